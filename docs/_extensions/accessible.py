"""The last touches that axe asks for: blocks that scroll take the focus, headings have levels, parameters are lines."""

import re
from typing import Any

from sphinx.application import Sphinx

SCROLLS = re.compile(r'<(pre|div class="(?:math|table)-wrapper[^"]*")(?=>)')

PARAMETERS = re.compile(r'<dl>\n(<dd><em class="sig-param">.*?)</dl>', re.DOTALL)
"""The parameters of a long signature, which Sphinx writes as definitions without a term."""


def as_lines(found: re.Match[str]) -> str:
    """Parameters as lines of a signature."""
    lines = found[1].replace("<dd>", '<span class="sig-line">').replace("</dd>", "</span>")
    return f"<span>\n{lines}</span>"


def touch(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Add the attributes to the body of a page and to its navigation."""
    context["body"] = PARAMETERS.sub(as_lines, SCROLLS.sub(r'<\1 tabindex="0"', context.get("body", "")))
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect it, after the theme."""
    app.connect("html-page-context", touch, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
