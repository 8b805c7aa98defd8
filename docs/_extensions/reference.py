"""The reference: `{names}` lists the public names of modules, and docstrings are read as the project writes them.

A name that several packages offer is described once, by the page that comes first in `reference/index`; the other pages
link to it.
"""

import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from types import MethodDescriptorType
from typing import Any

from sphinx.application import Sphinx

DIRECTIVE = re.compile(r"```\{names\} (\S+)\n```\n")


def public(module: str) -> dict[str, Any]:
    """The public names of a module: its `__all__`, or the classes and functions that it defines."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None)
    if names is None:
        defined = {name: value for name, value in vars(found).items() if getattr(value, "__module__", None) == module}
        return {name: value for name, value in sorted(defined.items()) if not name.startswith("_") and callable(value)}
    return {name: getattr(found, name) for name in names if not inspect.ismodule(getattr(found, name))}


@cache
def homes(docs: Path) -> dict[int, str]:
    """By the identity of an object, the name under which the reference describes it."""
    index = (docs / "reference/index.md").read_text(encoding="utf-8")
    pages = re.findall(r"^[a-z-]+$", index.partition("```{toctree}")[2], re.MULTILINE)
    found: dict[int, str] = {}
    for page in pages:
        for module in DIRECTIVE.findall((docs / f"reference/{page}.md").read_text(encoding="utf-8")):
            for name, value in public(module).items():
                found.setdefault(id(value), f"{module}.{name}")
    return found


def of_bases(one: type, docs: Path) -> list[str]:
    """The members of a class that one of its bases has, where the reference describes this base too."""
    described = [base for base in one.__mro__[1:] if id(base) in homes(docs)]
    return sorted({name for base in described for name in dir(base) if not name.startswith("_")})


def entries(module: str, docs: Path) -> str:
    """The reStructuredText that describes the names of a module."""
    described, elsewhere = [], []
    for name, value in public(module).items():
        home = homes(docs)[id(value)]
        if home != f"{module}.{name}":
            elsewhere.append(f":py:obj:`{name} <{home}>`")
        elif inspect.isclass(value):
            described.append(
                f".. autoclass:: {home}\n   :members:\n   :exclude-members: {', '.join(of_bases(value, docs))}"
            )
        elif callable(value):
            described.append(f".. autofunction:: {home}")
        else:
            described.append(f".. autodata:: {home}\n   :no-value:")
    also = [f"Also here: {', '.join(elsewhere)}."] if elsewhere else []
    return "\n".join(["```{eval-rst}", "\n\n".join(described + also), "```", ""])


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Expand the directive as a page is read."""
    source[0] = DIRECTIVE.sub(lambda found: entries(found[1], Path(app.srcdir)), source[0])


def foreign(app: Sphinx, what: str, name: str, object_: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out the members that a class has from another library, such as those of `nn.Module`."""
    if isinstance(object_, MethodDescriptorType):  # of a tuple, such as `count`
        return True
    home = getattr(getattr(object_, "fget", object_), "__module__", None) or "regard"
    return None if home.startswith("regard") else True


def literal(text: str) -> str:
    """Mark the indented lines before the sections as code."""
    head, section, rest = text.partition("\n\nArgs:\n")
    return re.sub(r"\n\n(?=    \S)", "\n\n::\n\n", head) + section + rest


def docstring(app: Sphinx, what: str, name: str, object_: Any, options: Any, lines: list[str]) -> None:
    """Write code in single backticks and formulas in dollars as reStructuredText has them."""
    whole = re.sub(r"(?<![`:\w])`([^`]+)`(?![`_])", r"``\1``", literal("\n".join(lines)))
    lines[:] = re.sub(r"(?<![\\$`])\$([^$`]+?)\$(?!\$)", r":math:`\1`", whole).split("\n")
    if lines and what in ("property", "attribute", "data"):
        # Napoleon takes the words before a colon for a type, and Python says of a field that it is one.
        lines[0] = "" if lines[0].startswith("Alias for field number") else lines[0].replace(": ", " – ")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect all, docstrings before napoleon reads the sections."""
    app.connect("source-read", read)
    app.connect("autodoc-skip-member", foreign)
    app.connect("autodoc-process-docstring", docstring, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
