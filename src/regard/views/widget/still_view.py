"""A view as a picture: for a kernel without anywidget, and for a notebook that shows no widgets."""

import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from regard.errors import MissingExtraError
from regard.views.display import bundle
from regard.views.html.contents import Example
from regard.views.html.numbers import as_heads
from regard.views.html.page import page
from regard.views.widget.kept_factors import maps_with_factors
from regard.watching.report import count

MOST_DRAWN = 1 << 24
"""The most weights of an example that are read for a picture that was not asked for."""
ELSEWHERE = "A picture of the view: run the cell to point at its words."


class StillView:
    """Attention in a notebook, without anywidget. See `regard.view`."""

    still: bytes | None = None

    def __init__(self, examples: Sequence[Example], title: str, link: str = "") -> None:
        self.examples, self.title, self.link = examples, title, link
        self.shown = [[as_heads(name, one.weights) for name, one in example.maps.items()] for example in examples]

    def save(self, path: str | os.PathLike[str], *, budget_mb: float = 8.0, **options: Any) -> Path:
        options.setdefault("factors", maps_with_factors(self.examples, budget_mb))
        page(self.examples, path=path, title=self.title, budget_mb=budget_mb, **options)
        return Path(path)

    def close(self) -> None:
        """Do nothing: there is no widget."""

    def __repr__(self) -> str:
        maps = [
            f"{name} ({count(len(heads), 'head')}, {heads.shape[-2]} x {heads.shape[-1]})"
            for example, some in zip(self.examples, self.shown, strict=True)
            for name, heads in zip(example.maps, some, strict=True)
        ]
        more = f", and {len(maps) - 4} more" if len(maps) > 5 else ""
        shown = ", ".join(maps[: 4 if more else 5])
        return f"View({self.title!r}, {count(len(maps), 'map')}: {shown}{more})"

    def _repr_mimebundle_(self, **asked: Any) -> Any:
        install = f"No interactive view: {MissingExtraError('anywidget', extra='notebook')}"
        data, metadata = bundle(self.examples[0])
        html = f"{data['text/html']}<p>{escape(install)}</p>" if "text/html" in data else None
        told = data["text/plain"].removeprefix(repr(self.examples[0]))
        return {**data, **({"text/html": html} if html else {}), "text/plain": f"{self!r}{told}\n{install}"}, metadata

    def picture(self) -> str:
        """The first example as HTML, or of many weights its repr, with a line for notebooks without widgets."""
        few = sum(math.prod(heads.shape) for heads in self.shown[0]) <= MOST_DRAWN
        drawn = bundle(self.examples[0])[0].get("text/html", "") if few else ""
        return f"{drawn or escape(repr(self))}<p>{escape(ELSEWHERE)}</p>"
