"""Each chapter has the book's form, runs from top to bottom, and its exercises fail until they are solved."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests import ROOT
from tests.book.chapters import CHAPTERS, SECTIONS, cells, path_of, run, sections, sentences

pytestmark = [
    pytest.mark.usefixtures("as_installed"),
    # transformers calls what torch has deprecated; nothing of it is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of figures at each `plt.show()`."""
    counts: list[int] = []

    def show() -> None:
        counts.append(len(plt.get_fignums()))
        plt.close("all")

    monkeypatch.setattr(plt, "show", show)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    yield counts
    torch.set_rng_state(state)
    torch.set_num_threads(threads)
    plt.close("all")


def is_picture(value: Any) -> bool:
    """Whether a notebook draws the value of a cell's last expression."""
    return isinstance(value, Figure | Axes) or hasattr(value, "_repr_png_") or hasattr(value, "_repr_mimebundle_")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_runs_and_its_exercises_fail_until_they_are_solved(
    chapter: str, shown: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    asserts: set[str] = set()
    for cell in cells(path_of(chapter).read_text(encoding="utf-8")):
        if "exercise" in cell.tags:
            with pytest.raises(AssertionError):
                run(cell, dict(names))
            asserts = set(re.findall(r"^assert .+", cell.code, re.MULTILINE))
            assert asserts, "an exercise ends with an assert"
            continue
        if "solution" in cell.tags:
            assert asserts <= set(re.findall(r"^assert .+", cell.code, re.MULTILINE)), "a solution meets its exercise"
        if is_picture(run(cell, names)):
            shown.append(1)
    assert shown, "a chapter shows a picture"
    assert min(shown) > 0


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_has_the_form_of_the_book(chapter: str) -> None:
    text = path_of(chapter).read_text(encoding="utf-8")
    found = cells(text)
    assert sections(text) == SECTIONS
    assert re.search(rf"^# {int(chapter[:2])}\. .+\n\n\*\*.+\?\*\*$", text, re.MULTILINE), "a title and one question"
    assert [cell.tags[0] for cell in found if cell.tags[0] in ("exercise", "solution")] == ["exercise", "solution"] * 3
    assert set(re.findall(r"^```\{(.+?)\}", text, re.MULTILINE)) <= {"code-cell", "in-models"}
    assert text.count("```{in-models}") == 1
    long = [line for cell in found for line in cell.code.splitlines() if len(line) > 88]
    assert long == [], "a line of code fits the page"
    comparing = text.split("\n## The same by regard\n")[1].split("\n## ")[0]
    assert re.search(r"^assert ", comparing, re.MULTILINE), "both ways are compared"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_sentences_of_a_chapter_are_short(chapter: str) -> None:
    found = [len(sentence.split()) for sentence in sentences(path_of(chapter).read_text(encoding="utf-8"))]
    assert sum(found) / len(found) <= 14
    assert max(found) <= 32


def test_each_cell_of_the_gallery_draws() -> None:
    first, *others = cells((ROOT / "docs/gallery.md").read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    run(first, names)
    assert len(others) == 15
    assert [cell.code for cell in others if not is_picture(run(cell, names))] == []
