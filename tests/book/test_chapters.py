"""Each chapter has the book's form, runs from top to bottom, and its exercises fail until they are solved."""

import re
from typing import Any

import pytest

from tests import ROOT
from tests.book.chapters import CHAPTERS, SECTIONS, cells, formulas, is_picture, path_of, ran, run, sections, sentences

pytestmark = pytest.mark.usefixtures("as_installed")
# These train for long.
TRAINING = ("06-", "09-", "13-", "14-", "15-")
RUN = [pytest.param(name, marks=pytest.mark.slow) if name.startswith(TRAINING) else name for name in CHAPTERS]


@pytest.mark.parametrize("chapter", RUN)
def test_a_chapter_runs_and_its_exercises_fail_until_they_are_solved(chapter: str) -> None:
    asserts: set[str] = set()
    for cell in cells(path_of(chapter).read_text(encoding="utf-8")):
        found = set(re.findall(r"^assert .+", cell.code, re.MULTILINE))
        if "exercise" in cell.tags:
            asserts = found
            assert asserts, "an exercise ends with an assert"
        elif "solution" in cell.tags:
            assert asserts <= found, "a solution meets its exercise"
    done = ran(chapter)
    assert done.solved == [], "an exercise fails until it is solved"
    assert done.shown, "a chapter shows a picture"
    assert all(done.shown), "each `plt.show()` shows one"


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
def test_the_formulas_of_a_chapter_are_mathml(chapter: str) -> None:
    latex2mathml = pytest.importorskip("docutils.utils.math.latex2mathml")
    for block, line in formulas(path_of(chapter).read_text(encoding="utf-8")):
        assert "<math" in latex2mathml.tex2mathml(block or line, as_block=bool(block))


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
