"""Formulas as MathML, which browsers draw themselves: a page needs no script and no network for them."""

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError


def rendered(node: nodes.Node, as_block: bool) -> str:
    """The formula of a node, or an error that quotes it: docutils names a part of it at most."""
    try:
        return tex2mathml(node.astext(), as_block=as_block)
    except Exception as error:
        raise ExtensionError(f"{node.source}: docutils cannot draw the formula {node.astext()}: {error}") from error


def inline(translator: Any, node: nodes.math) -> None:
    """Write a formula within a line."""
    translator.body.append(rendered(node, as_block=False))
    raise nodes.SkipNode


def display(translator: Any, node: nodes.math_block) -> None:
    """Write a formula of its own line."""
    translator.body.append(f'<div class="math">{rendered(node, as_block=True)}</div>')
    raise nodes.SkipNode


def check(app: Sphinx, doctree: nodes.document) -> None:
    """Draw each formula as its page is read, so that a build without pages finds a bad one too."""
    for kind, as_block in ((nodes.math, False), (nodes.math_block, True)):
        for node in doctree.findall(kind):
            rendered(node, as_block=as_block)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer."""
    app.connect("doctree-read", check)
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
