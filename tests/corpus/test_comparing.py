"""The heads that changed: intervals against scipy's bootstrap and formulas, families of heads, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import scipy.stats
import tomli_w

from regard.corpus import compare_statistics
from regard.corpus.comparing import weights_of
from regard.corpus.settings import MeasureSettings
from regard.corpus.tables import heads_schema, totals_of, write_parquet
from tests.conftest import Call, check_one_line
from tests.corpus.conftest import measure_into

RANDOM = np.random.default_rng(0)


def folder_of(path: Path, values: Any, *, first: int = 0, statistic: str = "entropy", shards: int = 1) -> Path:
    """A folder of statistics of one layer: a row of values (H,) for each document, whose ids count from `first`."""
    documents, heads = values.shape
    for name in ("heads", "totals", "examples", "_done"):
        (path / name).mkdir(parents=True)
    rows = [
        {"id": f"d{first + n}", "n_tokens": 5, "layer": 0, "head": head, statistic: None if value != value else value}
        for n, of_heads in enumerate(values.tolist())
        for head, value in enumerate(of_heads)
    ]
    table = pa.Table.from_pylist(rows, schema=heads_schema(MeasureSettings("", statistic)))
    for number, part in enumerate(np.array_split(np.arange(documents), shards)):
        chosen = table.slice(part[0] * heads, len(part) * heads)
        write_parquet(path / "heads" / f"part-{number:05d}.parquet", chosen, {})
    write_parquet(path / "totals" / "part-00000.parquet", totals_of(table, [statistic]), {})
    (path / "run.toml").write_text(tomli_w.dumps({"statistics": [statistic], "examples": 0}), encoding="utf-8")
    (path / "_SUCCESS").touch()
    return path


def test_a_change_of_a_head_is_named_and_no_other(stats: Path, sharper: Path, call: Call) -> None:
    status, out, _ = call("measure", "--compare", str(stats), str(sharper))
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "1 of 4 heads changed: 20 differences, 95% intervals that hold together"
    assert {line.split()[0] for line in lines[2:]} == {"1.1"}
    assert lines[2].split()[1] == "entropy"
    found = compare_statistics(stats, sharper)
    assert found.difference[found.heads.index((1, 1)), found.statistics.index("entropy")] < 0
    assert not found.difference[:3].any()


def test_folders_that_differ_in_nothing_have_no_change(stats: Path, gpt2: Path, docs: Path, tmp_path: Path) -> None:
    """Nor where the sums are taken in another order."""
    other = measure_into(tmp_path / "other", gpt2, docs, "--shard-documents", "23")
    for one in (stats, other):
        assert (
            str(compare_statistics(stats, one)) == "no head changed: 20 differences, 95% intervals that hold together"
        )


def test_the_rounding_of_float32_is_no_change(tmp_path: Path) -> None:
    values = RANDOM.gamma(4, 1, (40, 2)).astype(np.float32)
    a, b = folder_of(tmp_path / "a", values), folder_of(tmp_path / "b", np.nextafter(values, np.float32(9e9)))
    found = compare_statistics(a, b)
    assert found.difference.all()
    assert not found.changed.any()


@pytest.mark.parametrize("kind", ["pairs", "others"])
def test_an_interval_is_that_of_scipy_and_of_the_formula(tmp_path: Path, kind: str) -> None:
    one = RANDOM.gamma(4, 1, (150, 1)).astype(np.float32)
    other = (one + RANDOM.normal(0.1, 0.4, one.shape)).astype(np.float32)
    if kind == "others":
        other = other[RANDOM.permutation(150)[:100]]
    a = folder_of(tmp_path / "a", one)
    b = folder_of(tmp_path / "b", other, first=0 if kind == "pairs" else 1000, shards=3)
    found = compare_statistics(a, b)
    expected = scipy.stats.bootstrap(
        (one[:, 0], other[:, 0]), lambda a, b, axis: b.mean(axis) - a.mean(axis), paired=kind == "pairs",
        method="basic", n_resamples=4000, rng=0,
    )  # fmt: skip
    width, difference = expected.confidence_interval.high - expected.confidence_interval.low, found.difference[0, 0]
    assert difference == pytest.approx(float(other.mean() - one.mean()), abs=1e-6)
    assert found.high[0, 0] - found.low[0, 0] == pytest.approx(width, rel=0.08)
    spread = [np.var(one, ddof=1) / len(one), np.var(other, ddof=1) / len(other)]
    error = np.std(other - one, ddof=1) / np.sqrt(150) if kind == "pairs" else np.sqrt(sum(spread))
    assert found.high[0, 0] - difference == pytest.approx(1.98 * error, rel=0.08)


def test_all_intervals_hold_together(tmp_path: Path) -> None:
    """Of 60 pairs of folders without a change, with 25 heads that belong together, a few have one: one in twenty."""
    wrong = 0
    for number in range(60):
        shared = RANDOM.normal(size=(30, 1))
        one, other = (RANDOM.normal(size=(30, 25)) + shared for _ in range(2))
        a = folder_of(tmp_path / f"{number}a", one, first=30 * number)
        wrong += bool(compare_statistics(a, folder_of(tmp_path / f"{number}b", other, first=30 * number)).changed.any())
    assert 0 < wrong <= 8


def test_the_weights_are_those_of_poisson_by_document_and_replicate() -> None:
    ids = [f"d{n}" for n in range(2000)]
    weights = weights_of(ids)
    assert np.array_equal(weights[:, 1234], weights_of(["d1234"])[:, 0])
    assert (weights[0] == 1).all()
    drawn = np.bincount(weights[1:].astype(int).ravel()) / weights[1:].size
    np.testing.assert_allclose(drawn[:6], scipy.stats.poisson.pmf(range(6), 1), atol=3e-3)
    assert np.abs(np.corrcoef(weights[1:9])[np.triu_indices(8, 1)]).max() < 0.1


def test_too_few_documents_have_no_interval_and_nulls_do_not_count(tmp_path: Path) -> None:
    values = RANDOM.normal(5, 1, (40, 3))
    values[19:, 1] = np.nan
    values[5, 2] = np.nan
    a, b = folder_of(tmp_path / "a", values), folder_of(tmp_path / "b", values + np.array([0.0, 1.0, 1.0]))
    found = compare_statistics(a, b)
    assert np.isnan(found.low[:, 0]).tolist() == [False, True, False]
    assert found.changed[:, 0].tolist() == [False, False, True]
    assert found.before[2, 0] == pytest.approx(np.nanmean(values[:, 2]), rel=1e-6)
    assert "; 1 have too few documents, under 20" in str(found)


def test_what_cannot_be_compared_is_refused_in_one_line(stats: Path, tmp_path: Path, call: Call) -> None:
    values = RANDOM.normal(size=(30, 2))
    two, three = folder_of(tmp_path / "two", values), folder_of(tmp_path / "three", RANDOM.normal(size=(30, 3)))
    named = folder_of(tmp_path / "named", values, statistic="first")
    begun = folder_of(tmp_path / "begun", values)
    (begun / "_SUCCESS").unlink()
    cut = folder_of(tmp_path / "cut", values)
    part = next((cut / "heads").iterdir())
    part.write_bytes(part.read_bytes()[:-30])
    for one, said in (
        (three, "has 2 heads, the last 0.1, and"),
        (named, "has entropy, and"),
        (begun, "is not finished"),
        (cut, "cannot be read"),
        (tmp_path, "holds no statistics"),
        (tmp_path / "absent", "is not a folder"),
    ):
        check_one_line(call("atlas", str(two), str(one)), said)
