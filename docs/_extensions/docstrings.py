"""Docstrings as the site shows them: formulas in dollars, and a reference page for each public name."""

import re
from typing import Any

from sphinx.application import Sphinx


def formulas(app: Sphinx, what: str, name: str, object_: Any, options: Any, lines: list[str]) -> None:
    """Write `$x$` as the role that Sphinx knows."""
    whole = re.sub(r"(?<![\\$`])\$([^$`]+?)\$(?!\$)", r":math:`\1`", "\n".join(lines))
    lines[:] = whole.split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect it, before napoleon reads the sections."""
    app.connect("autodoc-process-docstring", formulas, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
