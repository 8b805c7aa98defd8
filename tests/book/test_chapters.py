"""Each chapter has the book's form, runs from top to bottom, and its exercises fail until they are solved."""

import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch

from tests.book.chapters import CHAPTERS, SECTIONS, Cell, cells, path_of, sections, sentences

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


def run(cell: Cell, chapter: str, names: dict[str, object]) -> None:
    """Run one cell in the names of its chapter."""
    exec(compile(cell.code, chapter, "exec"), names)


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
                run(cell, chapter, dict(names))
            asserts = set(re.findall(r"^assert .+", cell.code, re.MULTILINE))
            assert asserts, "an exercise ends with an assert"
            continue
        if "solution" in cell.tags:
            assert asserts <= set(re.findall(r"^assert .+", cell.code, re.MULTILINE)), "a solution meets its exercise"
        run(cell, chapter, names)
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
