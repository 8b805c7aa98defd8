"""The chapters of the book as tests read them: their cells, their sections and their prose."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """One cell of code and its tags."""

    code: str
    tags: tuple[str, ...]


def run(cell: Cell, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does, and return the value of its last expression."""
    tree = ast.parse(cell.code)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        return exec(compile(tree, "a cell", "exec"), names)
    exec(compile(ast.Module(tree.body[:-1], []), "a cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "a cell", "eval"), names)


def path_of(chapter: str) -> Path:
    """The file of a chapter."""
    return BOOK / f"{chapter}.md"


def cells(text: str) -> list[Cell]:
    """The cells of a chapter in their order."""
    found = CELL.finditer(text)
    return [Cell(cell["code"], tuple((cell["tags"] or "").replace(" ", "").split(","))) for cell in found]


def sections(text: str) -> list[str]:
    """The headings of the second level."""
    return re.findall(r"^## (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)


def sentences(text: str) -> list[str]:
    """The sentences of the prose: without code, formulas, tables, headings and links' addresses."""
    text = re.sub(r"^---.*?^---$", "", text, count=1, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$|^#[^\n]*$|^\|[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\$[^$]+\$", "x", re.sub(r"\]\([^)]*\)", "]", text))
    return [part for part in re.split(r"(?<=[.?!:])\s+|\n\n+", text) if part.strip()]
