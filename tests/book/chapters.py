"""The chapters of the book as tests read them: their cells, their sections and their prose."""

import ast
import contextlib
import dataclasses
import re
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests import ROOT

BOOK = ROOT / "docs" / "book"
CHAPTERS = sorted(path.stem for path in BOOK.glob("[0-9][0-9]-*.md"))
SECTIONS = [
    "The formula",
    "Ten lines of torch",
    "The same by regard",
    "A picture",
    "What goes wrong",
    "Exercises",
    "In today's models",
]
CELL = re.compile(r"^```\{code-cell\}.*?\n(?::tags: \[(?P<tags>.*?)\]\n)?(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Cell:
    code: str
    tags: tuple[str, ...]


def run(cell: Cell, names: dict[str, Any]) -> Any:
    *before, last = ast.parse(cell.code).body
    if not isinstance(last, ast.Expr):
        return exec(compile(cell.code, "a cell", "exec"), names)
    exec(compile(ast.Module(before, []), "a cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "a cell", "eval"), names)


def is_picture(value: Any) -> bool:
    return isinstance(value, Figure | Axes) or hasattr(value, "_repr_png_") or hasattr(value, "_repr_mimebundle_")


def path_of(chapter: str) -> Path:
    return BOOK / f"{chapter}.md"


def cells(text: str) -> list[Cell]:
    found = CELL.finditer(text)
    return [Cell(cell["code"], tuple((cell["tags"] or "").replace(" ", "").split(","))) for cell in found]


def sections(text: str) -> list[str]:
    return re.findall(r"^## (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)


def formulas(text: str) -> list[tuple[str, str]]:
    return re.findall(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.S)


def sentences(text: str) -> list[str]:
    text = re.sub(r"^---.*?^---$", "", text, count=1, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$|^#[^\n]*$|^\|[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\$[^$]+\$", "x", re.sub(r"\]\([^)]*\)", "]", text))
    return [part for part in re.split(r"(?<=[.?!:])\s+|\n\n+", text) if part.strip()]


@dataclass(frozen=True)
class Ran:
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    shown: list[int] = field(default_factory=list)
    """The number of figures at each `plt.show()`, and 1 for a cell that ends with a figure."""
    solved: list[str] = field(default_factory=list)
    """The exercises that passed as they are."""


@cache
def ran(chapter: str) -> Ran:
    done = Ran()
    with _alone(done.shown):
        for cell in cells(path_of(chapter).read_text(encoding="utf-8")):
            if "exercise" not in cell.tags:
                if is_picture(run(cell, done.names)):
                    done.shown.append(1)
                continue
            with contextlib.suppress(AssertionError):
                run(cell, dict(done.names))
                done.solved.append(cell.code)
    return done


def names_of(chapter: str) -> dict[str, Any]:
    return ran(chapter).names


@contextlib.contextmanager
def _alone(shown: list[int]) -> Iterator[None]:
    def show() -> None:
        shown.append(len(plt.get_fignums()))
        plt.close("all")

    state, threads = torch.get_rng_state(), torch.get_num_threads()
    printed = dataclasses.asdict(torch._tensor_str.PRINT_OPTS)
    with (
        tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder),
        mock.patch.object(plt, "show", show), warnings.catch_warnings(), plt.rc_context(),
    ):  # fmt: skip
        # transformers calls what torch has deprecated; nothing of it is ours.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        finally:
            torch.set_rng_state(state)
            torch.set_num_threads(threads)
            torch.set_printoptions(**printed)
            plt.close("all")
