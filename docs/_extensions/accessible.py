"""The last touches that axe asks for: blocks that scroll can be reached by the keyboard, and headings have a level."""

import re
from typing import Any

from sphinx.application import Sphinx

SCROLLS = re.compile(r'<(pre|div class="(?:math|table)-wrapper[^"]*")(?=>)')


def touch(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Add the attributes to the body of a page and to its navigation."""
    context["body"] = SCROLLS.sub(r'<\1 tabindex="0"', context.get("body", ""))
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect it, after the theme."""
    app.connect("html-page-context", touch, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
