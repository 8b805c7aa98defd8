"""Each chapter as a notebook and as a script, beside its page."""

from pathlib import Path

import in_models
import jupytext
import nbformat
from sphinx.application import Sphinx

from regard.version import __version__

FIRST = f"""%pip install -q "regard[all]=={__version__}" transformers
import torch, transformers, regard
print("regard", regard.__version__, "torch", torch.__version__, "transformers", transformers.__version__)"""


def is_chapter(docname: str) -> bool:
    """Whether a page is a chapter: its name begins with its number."""
    return docname.startswith("book/") and docname.split("/")[1][:2].isdigit()


def notebook(path: Path) -> nbformat.NotebookNode:
    """The notebook of a chapter: its cells, after one that installs the release; solutions are folded."""
    made = jupytext.reads(in_models.expanded(path.read_text(encoding="utf-8")), fmt="md:myst")
    for cell in made.cells:
        tags = cell.metadata.get("tags", [])
        if "solution" in tags:
            cell.metadata["jupyter"] = {"source_hidden": True}
        cell.metadata["tags"] = [tag for tag in tags if tag in ("exercise", "solution")]
    made.cells.insert(0, nbformat.v4.new_code_cell(FIRST))
    for number, cell in enumerate(made.cells):
        cell["id"] = f"cell-{number}"
    made.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return made


def script(path: Path) -> str:
    """The script of a chapter, its prose as comments; exercises are left out, because each fails until it is solved."""
    made = jupytext.reads(in_models.expanded(path.read_text(encoding="utf-8")), fmt="md:myst")
    made.cells = [cell for cell in made.cells if "exercise" not in cell.metadata.get("tags", [])]
    return str(jupytext.writes(made, fmt="py:percent"))


def link(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the links below the title."""
    if is_chapter(docname):
        name = docname.split("/")[1]
        head, title, rest = source[0].partition("\n# ")
        first, _, rest = rest.partition("\n")
        links = f'<a href="{name}.ipynb" download>notebook</a> · <a href="{name}.py" download>script</a>'
        source[0] = f"{head}{title}{first}\n\n<p class='downloads'>{links}</p>\n{rest}"


def write(app: Sphinx, exception: Exception | None) -> None:
    """Write both files of each chapter."""
    if exception is None and app.builder.format == "html":
        for docname in filter(is_chapter, app.env.found_docs):
            path, made = Path(app.srcdir) / f"{docname}.md", Path(app.outdir) / docname
            nbformat.write(notebook(path), made.with_suffix(".ipynb"))
            made.with_suffix(".py").write_text(script(path), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect both."""
    app.connect("source-read", link, priority=600)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
