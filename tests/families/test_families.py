"""A sample of docs/families.md is examined anew, and the page is what its rows say."""

import json
from importlib.metadata import version
from random import Random
from typing import Any

import pytest

from tests import ROOT
from tests.families import checks, table

pytest.importorskip("transformers")
from tests.families.__main__ import in_a_process
from tests.families.architectures import architectures, library

SAMPLE = ["bert", "distilbert", "llama", "t5", "vit", "clip", "deepseek_v32", "bridgetower", "bloom"]
"""Written out and dispatched, with masks of every kind, pictures, encoders with decoders, experts."""

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["architecture"]: row for row in table.rows()}


def test_the_page_is_made_of_its_rows() -> None:
    assert table.page() == table.PAGE.read_text(encoding="utf-8")


def test_there_is_a_row_for_every_architecture_with_a_number_or_a_reason(rows: dict[str, dict[str, Any]]) -> None:
    library()
    if not version("transformers").startswith("5.23."):
        pytest.skip(f"the page is of transformers 5.23, and this is {version('transformers')}")
    assert set(rows) == set(architectures())
    for row in rows.values():
        if "why" not in row:
            assert table.error(row) != ""
            assert not table.is_wrong(row), row["architecture"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_made_anew_says_the_same(name: str, rows: dict[str, dict[str, Any]]) -> None:
    library()
    row = in_a_process(name)
    assert "why" not in row, row
    assert not table.is_wrong(row)
    assert row["bits"]
    assert row["wrong"] == row["eager_wrong"] == 0
    for field in ("maps", "run", "matched", "missed"):
        assert row[field] == rows[name][field]
    told = row["enable"]
    assert told["taken"] == rows[name]["enable"]["taken"]
    if told["taken"]:
        assert told["error"] < 1e-5
        assert told["gradient"] < 1e-5
        assert not told["maps_wrong"]


CHECKED = 16
"""How many architectures are drawn to be checked anew, beside three with a known finding, and three that once had a
false one: of ties, of a canvas that is read both ways, of float64 alone."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *Random(7).sample([row["architecture"] for row in table.rows() if "why" not in row], CHECKED),
        *("bamba", "convbert", "moshi", "deepseek_v32", "diffusion_gemma", "shieldgemma2", "prophetnet"),
    ],
)
def test_a_check_of_an_architecture_finds_what_is_known_of_it(name: str) -> None:
    library()
    row = in_a_process(name, 150, checks.check)
    found = {reason for way in ("made up", "given") for reason in row[way].get("reasons", ())}
    assert found == set(checks.KNOWN.get(name, ())), row


def test_a_wrong_row_is_told() -> None:
    row = json.loads((ROOT / "docs/families.jsonl").read_text(encoding="utf-8").splitlines()[0])
    fine = {**row, "wrong": 0, "without_a_map": {}, "bits": True, "repeatable": True}
    assert not table.is_wrong(fine)
    assert table.is_wrong({**fine, "wrong": 1, "error": 0.1})
    assert not table.is_wrong({**fine, "wrong": 1, "error": 2e-5, "error_float64": 1e-13})
    assert table.is_wrong({**fine, "without_a_map": {"[2, 4, 11, 11]": 1}, "missed": [], "others": []})
    assert table.is_wrong({**fine, "bits": False})
    other = {**fine, "architecture": "groupvit", "wrong": 1, "error": 0.4}
    assert not table.is_wrong({**other, "rebuilt": 1e-7})
    assert table.is_wrong({**other, "rebuilt": 1e-2})
    assert table.is_wrong({**other, "rebuilt": None})
    assert "**Wrong:" in table.summary([{**fine, "bits": False}])
