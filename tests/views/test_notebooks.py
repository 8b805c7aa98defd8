"""The pages' own examples as notebooks, executed in each state of a session: no error, and each result shown once."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import regard.views
from tests import ROOT
from tests.views.test_display import handed_back

nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed (the extra `dev`)")

EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], nbformat.NO_CONVERT)
nbclient.NotebookClient(notebook, timeout=120).execute()
nbformat.write(notebook, sys.argv[1])
"""
STATES = {
    "nothing imported": "",
    "pyplot imported": "import matplotlib.pyplot",
    "%matplotlib inline": "%matplotlib inline",
    "widget extension absent": "import sys; sys.modules['anywidget'] = None",
}
"""Each state is that of the one before, and a line more; so they share one kernel, which takes seconds to start."""
PAGES = ("linear", "pictures", "page", "maps", "losses", "coming-from", "editing")
USES = ("audit", "contacts", "steering", "words-in-time")
NOTEBOOKS = ["README.md", *(f"docs/{name}.md" for name in PAGES), *(f"docs/uses/{name}.md" for name in USES)]
SHOWING = {*regard.views.__all__, "view", "watch", "map_of", "explain"} - {"save_figure", "map_text"}
RICH = "|".join(one.__name__ for one in handed_back() if hasattr(one, "_repr_mimebundle_"))
SILENT = re.compile(rf"<(Axes|Figure|regard)|({RICH})\(")
"""The text of a result that could have shown itself."""


def cells(page: str) -> Iterator[str]:
    """The page's code, cut behind each expression, and a cell for each figure or view that has a name."""
    text = "".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL))
    cut: list[str] = []
    for node in ast.parse(text).body:
        cut.append(ast.get_source_segment(text, node) or "")
        shown = _named_figure(node)
        if shown or isinstance(node, ast.Expr):
            yield "\n".join(cut)
            cut = []
        if shown:
            yield shown
    yield "\n".join(cut)


def _named_figure(node: ast.stmt) -> str:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id=function))):
            return name if function in SHOWING else ""
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Attribute(attr=function))):
            return name if function in SHOWING else ""
    return ""


@pytest.mark.slow
def test_notebooks_show_each_result_once_in_every_state(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook()
    for state, line in STATES.items():
        for page in NOTEBOOKS:
            for source in (line, *cells(page)):
                notebook.cells.append(nbformat.v4.new_code_cell(source, metadata={"of": [state, page]}))
        if state == "nothing imported":
            untouched = "import sys; assert 'matplotlib.pyplot' not in sys.modules"
            notebook.cells.append(nbformat.v4.new_code_cell(untouched, metadata={"of": [state, page]}))
    counted: dict[str, Counter[str]] = {state: Counter() for state in STATES}
    for cell in executed(notebook, tmp_path):
        state, page = cell.metadata["of"]
        counted[state][page] += shown_once(cell)
    first, *others = counted.values()
    assert +first == {"docs/pictures.md": 3, "docs/page.md": 2, "docs/maps.md": 2}
    assert set(first) == set(NOTEBOOKS)
    assert others == [first] * 3, "a state shows fewer results than another"


def executed(notebook: Any, folder: Path) -> list[Any]:
    """The cells of a notebook with their outputs; in a process of its own, which keeps sockets open until it ends."""
    path = folder / "all.ipynb"
    nbformat.write(notebook, path)
    folders = ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(path)], capture_output=True, text=True, check=False, cwd=folder,
        env={**os.environ, **{name: str(folder / name.lower()) for name in folders}},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return list(nbformat.read(path, nbformat.NO_CONVERT).cells)


def shown_once(cell: Any) -> int:
    shown = [one.data for one in cell.outputs if one.output_type in ("display_data", "execute_result")]
    static = [data for data in shown if "application/vnd.jupyter.widget-view+json" not in data]
    assert len(static) <= 1, f"shown twice: {cell.source}"
    for data in static:
        is_rich = bool({"text/html", "image/png"} & set(data))
        assert is_rich or not SILENT.match(data["text/plain"]), f"{data['text/plain'][:80]} of {cell.source}"
        return int(is_rich)
    return 0
