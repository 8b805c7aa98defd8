"""`llms.txt`: the pages of the site with a line each, for programs that read documentation (llmstxt.org)."""

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment


def in_order(env: BuildEnvironment, page: str = "index") -> list[str]:
    """The pages in the order of the tables of contents."""
    return [page, *(found for child in env.toctree_includes.get(page, []) for found in in_order(env, child))]


def line(env: BuildEnvironment, page: str) -> str:
    """The title of a page, its address and its first paragraph."""
    first = next(iter(env.get_doctree(page).findall(nodes.paragraph)), None)
    said = " ".join(first.astext().split()) if first is not None else ""
    return f"- [{env.titles[page].astext()}]({page}.html): {said[:200]}"


def write(app: Sphinx, exception: Exception | None) -> None:
    """Write the file beside the pages."""
    if exception is None and app.builder.format == "html":
        pages = list(dict.fromkeys(in_order(app.env)))
        text = "\n".join(["# regard", "", *(line(app.env, page) for page in pages), ""])
        (Path(app.outdir) / "llms.txt").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect it."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
