"""RESULTS.md stays short, and a run replaces its own rows there and no others."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import __main__ as program
from benchmarks import harness, page

ROOT = Path(__file__).parents[2]
HEADER = "| setting | ms |\n|---|---|"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "RESULTS.md"
    monkeypatch.setattr(page, "RESULTS", path)
    return path


def write(name: str, row: str, *, processor: str = "A", title: str = "Time", note: str = "Alone.") -> None:
    found = page.Found(name, title, f"python -m benchmarks {name}", HEADER, [row], [note])
    page.write(found, processor=processor, details="2026-01-01")


def test_the_page_is_short_enough_to_read() -> None:
    assert len((ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8").splitlines()) <= 300


def test_a_claim_is_replaced_on_its_own_processor_alone(results: Path) -> None:
    write("speed", "| T = 1 | 1 |")
    write("speed", "| T = 1 | 2 |", processor="A with B")
    write("memory", "| T = 1 | 3 |", title="Memory")
    before = results.read_text()
    write("speed", "| T = 1 | 4 |")
    after = results.read_text()
    assert after == before.replace("| T = 1 | 1 |", "| T = 1 | 4 |")
    assert [line for line in after.splitlines() if line.startswith("#")] == [
        "# Results", "## Time", "### A", "### A with B", "## Memory", "### A"
    ]  # fmt: skip


def test_claims_that_share_a_section_keep_one_another_s_rows(results: Path) -> None:
    write("consumers.one", "| T = 1 | 1 |", title="One")
    write("consumers.two", "| T = 1 | 2 |", title="Two")
    write("consumers.one", "| T = 1 | 3 |", title="One", note="Again.")
    text = results.read_text()
    assert text.count("## Uses of attention weights\n### A\n| setting | ms |") == 1
    assert [line for line in text.splitlines() if line.startswith("| `")] == [
        "| `consumers.two`: T = 1 | 2 |",
        "| `consumers.one`: T = 1 | 3 |",
    ]
    assert "Alone" not in text.partition("consumers.one`, ")[2]


def test_the_page_is_as_it_is_written() -> None:
    """Each section of it is one that a run finds again: a heading, a table or a paragraph, and a command."""
    text = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        for part in section.split("\n### ")[1:]:
            assert "`, 20" in part, part


def test_rows_of_one_setting_stand_side_by_side() -> None:
    rows = [harness.Row(f"T = {n}, {kind}", 0.002, 0.001, 2.0, 1.9, 2.1, bar)
            for n in (1, 2) for kind, bar in (("forward", 1.5), ("forward, with weights", 2.5))]  # fmt: skip
    header, lines = harness.side_by_side(rows, {", forward": "forward", ", forward, with weights": "with weights"})
    assert header == "| setting | forward | with weights |\n|---|---|---|"
    cells = "2.00x (1.90 to 2.10) of 1.5x; 2.0, 1.0 ms | **2.00x** (1.90 to 2.10) of 2.5x; 2.0, 1.0 ms"
    assert lines == [f"| T = 1 | {cells} |", f"| T = 2 | {cells} |"]


def test_a_claim_that_was_not_run_leaves_the_page(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("speed", "| T = 1 | 1 |")
    before = results.read_text()
    module = ModuleType("benchmarks.fake")
    module.TITLE, module.run = "Fake", lambda: ([], ["Not run: there is no corpus."])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchmarks.fake", module)
    program.main(["fake"])
    assert results.read_text() == before


def test_a_table_may_come_as_a_note(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("benchmarks.fake")
    module.TITLE = "Fake"  # type: ignore[attr-defined]
    module.run = lambda: ([], ["After one step:", f"{HEADER}\n| T = 1 | 1 |"])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchmarks.fake", module)
    program.main(["fake"])
    text = results.read_text()
    assert f"### {harness.processor()}\n{HEADER}\n| T = 1 | 1 |\n\n`python -m benchmarks fake`, " in text
    assert text.endswith("After one step:\n")
