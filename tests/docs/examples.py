"""The examples of README, pages and docstrings as modules, for type checkers."""

import ast
import doctest
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT
from tests.book.chapters import cells

SOURCE = ROOT / "src"


def write_modules(folder: Path) -> list[Path]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {f"page_{_name(page)}": of_page(page.read_text(encoding="utf-8")) for page in pages}
    texts |= {f"in_{_name(path)}": of_docstrings(path) for path in sorted((SOURCE / "regard").rglob("*.py"))}
    written = []
    for name, text in texts.items():
        if text:
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
            written.append(folder / f"{name}.py")
    return written


def _name(path: Path) -> str:
    return re.sub(r"\W", "_", str(path.relative_to(ROOT).with_suffix(""))).lower()


def of_page(text: str) -> str:
    """The blocks of a page, one after another; an exercise is for the reader to fill."""
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return "\n".join([*blocks, *(cell.code for cell in cells(text) if "exercise" not in cell.tags)])


def of_docstrings(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [
        f"def example_{number}() -> None:\n" + textwrap.indent(source, "    ")
        for number, source in enumerate(filter(None, map(_sources, ast.walk(tree))))
    ]
    if not functions:
        return ""
    used = {node.id for node in ast.walk(ast.parse("\n".join(functions))) if isinstance(node, ast.Name)}
    return "\n".join([*_prelude(tree, _module(path), used), *functions])


def _sources(node: ast.AST) -> str:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        return ""
    text = ast.get_docstring(node) or ""
    return "".join(one.source for one in doctest.DocTestParser().get_examples(text))


def _prelude(tree: ast.Module, module: str, used: set[str]) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.Import(names) | ast.ImportFrom(names=names):
                if kept := [one for one in names if (one.asname or one.name.partition(".")[0]) in used]:
                    yield ast.unparse(ast.Import(kept) if isinstance(node, ast.Import) else _from(node, kept))
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                if name in used:
                    yield f"from {module} import {name}"
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if name in used:
                    yield f"from {module} import {name}"


def _from(node: ast.ImportFrom, names: list[ast.alias]) -> ast.ImportFrom:
    return ast.ImportFrom(node.module, names, node.level)


def _module(path: Path) -> str:
    name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    return name.removesuffix(".__init__")
