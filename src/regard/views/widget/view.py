"""`regard.view(seen)`: the page as a widget of a notebook, with a kernel behind it.

Without anywidget, and in a notebook that shows no widgets, the view is a picture.
"""

import math
import os
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from regard.errors import ArgumentError, MissingExtraError
from regard.maps.sources.call import CallSource
from regard.tensors.kinds import refuse_wrong_kinds
from regard.views.display import bundle
from regard.views.examples import Viewed, examples_of, title_of
from regard.views.html.contents import Example
from regard.views.html.factors import factors_of, why_none
from regard.views.html.numbers import as_heads, spans
from regard.views.html.page import page
from regard.views.widget.replies import Replier
from regard.views.widget.skeleton import front_end, skeleton
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
        few = sum(math.prod(heads.shape) for heads in self.shown[0]) <= MOST_DRAWN
        drawn = bundle(self.examples[0])[0].get("text/html", "") if few else ""
        return f"{drawn or escape(repr(self))}<p>{escape(ELSEWHERE)}</p>"


LEAST_HEIGHT = 300
"""Pixels; a lower view shows no map."""


class NotebookView(Protocol):
    """The result of `regard.view`: an `anywidget.AnyWidget` with these."""

    link: str
    """The selection, as the part of a page's address after "#". It follows the view, and can be set."""
    still: bytes | None
    """The last picture of the view as PNG, or None."""

    def save(self, path: str | os.PathLike[str], *, budget_mb: float = 8.0, **options: Any) -> Path:
        """Write the page, without a kernel and within its budget; see `regard.page`.

        The page opens with the same selection in its address ("#" and the link). Short maps keep the choice of
        temperature and mask.

        Raises:
            FileError: the file cannot be written; an older one stays as it was.
            RegardError: see `regard.page`.
        """

    def close(self) -> None:
        """Remove the view, and free its memory."""


@refuse_wrong_kinds
def view(
    maps: Viewed,
    tokens: Any = None,
    *,
    source: Sequence[str] | None = None,
    sequence: int = 0,
    title: str = "",
    link: str = "",
    height: int = 560,
) -> NotebookView:
    """Show attention in a notebook: Jupyter, or any other host of anywidget's protocol.

    It is the page of `regard.page`, drawn by the same script. The kernel sends weights on request, so that every
    row and every region of every head is exact, at any length. Making the view computes nothing.

    Args:
        maps: as for `page`: the recording of `regard.watch`, attention maps or tensors (batch..., H, T, S), a
            model, a pair of a model and its inputs, or examples of `regard.views`.
        tokens: labels for every axis of as many queries or keys. Examples have labels of their own. Beside a model,
            its inputs: one argument, a tuple of them, or a mapping.
        source: labels of another sequence, such as an encoder's, likewise.
        sequence: the sequence of the batch, counted through all its dimensions.
        title: the heading; "" for the name of the watched model's class.
        link: the first selection, as `link` of another view or of a page gives it: "heads=2&query=7".
        height: of the view, in CSS pixels, at least 300.

    Returns:
        A widget; see `NotebookView`. Without anywidget, a picture, and a line that says how to install it.

    Temperature and mask can be chosen for a softmax of scaled dot products without a bias. The kernel recomputes these
    weights, and the view marks them as not the model's.

    Raises:
        ArgumentError: there are no maps, labels came with examples, or an argument is out of its range.
        ShapeError: no such sequence, or labels that fit no map.

    >>> import torch, regard
    >>> q = torch.randn(1, 4, 8, 16)
    >>> weights = regard.attention(q, q, q, return_weights=True).weights
    >>> regard.view(weights, "eight words and one head to look at".split())
    View('Attention', 1 map: 0 (4 heads, 8 x 8))
    """
    if not isinstance(height, int) or height < LEAST_HEIGHT:
        raise ArgumentError(f"height must be a whole number of pixels from {LEAST_HEIGHT} up; got {height!r}")
    for name, given in (("title", title), ("link", link)):
        if not isinstance(given, str):
            raise ArgumentError(f"{name} must be text; got {given!r}")
    title = title_of(maps, title)
    examples = examples_of(maps, tokens, source, sequence, title)
    if find_spec("anywidget") is None:
        return StillView(examples, title, link)
    return cast(NotebookView, _view_class()(examples, title, link, height))


@cache
def _view_class() -> Any:
    import anywidget
    import traitlets
    from IPython.display import display

    class View(StillView, anywidget.AnyWidget):
        """Attention in a notebook. See `regard.view`."""

        _esm = front_end()
        _repr_mimebundle_ = anywidget.AnyWidget._repr_mimebundle_
        data = traitlets.Dict().tag(sync=True)
        link = traitlets.Unicode("").tag(sync=True)
        height = traitlets.Int(560).tag(sync=True)
        place = traitlets.Unicode("").tag(sync=True)

        def __init__(self, examples: list[Example], title: str, link: str, height: int) -> None:
            self.examples, self.title, self.shown = examples, title, (answers := Replier(examples)).maps
            self._answers = answers
            self._is_shown = False
            data, place = skeleton(examples, self.shown, title), f"regard-still-{os.urandom(8).hex()}"
            anywidget.AnyWidget.__init__(self, data=data, link=link, height=height, place=place)
            self.on_msg(self._heard)

        def _heard(self, _: Any, content: Any, buffers: list[Any]) -> None:
            if not isinstance(content, dict):
                return
            if content.get("kind") == "still" and buffers:
                self.still = bytes(buffers[0])
                if self._is_shown:
                    display(self._still_bundle(), raw=True, display_id=self.place, update=True)
            if content.get("kind") != "question":
                return
            reply = {"kind": "answer", "id": content.get("id")}
            try:
                found, sent = self._answers.to(content)
            except Exception as error:  # whatever it is, the reader of the view is the one who asked
                self.send(reply | {"error": f"{type(error).__name__}: {error}"})
            else:
                self.send(reply | found, sent)

        def _still_bundle(self) -> dict[str, str]:
            """The last picture as HTML, for notebooks without a kernel; a live view hides it."""
            if self.still is None:
                inner = self.picture()
            else:
                source = f"data:image/png;base64,{b64encode(self.still).decode()}"
                inner = f'<img style="max-width: 100%" alt="{escape(repr(self))}, as last seen" src="{source}">'
            return {"text/html": f'<div class="{self.place}">{inner}</div>', "text/plain": repr(self)}

        def _ipython_display_(self) -> None:
            bundle: Any = self._repr_mimebundle_()
            # Older anywidgets return the bundle alone, newer ones with its metadata.
            data, about = bundle if isinstance(bundle, tuple) else (bundle, {})
            display(data, metadata=about, raw=True)
            display(self._still_bundle(), raw=True, display_id=self.place)
            self._is_shown = True

    return View


SHARE = 0.25


def maps_with_factors(examples: Sequence[Example], budget_mb: float) -> list[str]:
    """The maps whose queries and keys a page can carry in a quarter of its budget, first come, first carried."""
    left = SHARE * budget_mb * 2**20
    chosen: dict[str, None] = {}
    without: set[str] = set()
    for example in examples:
        for name, one in example.maps.items():
            heads = as_heads(name, one.weights)
            source, (count, queries, keys) = heads.source, heads.shape
            if why_none(heads) or not isinstance(source, CallSource):
                without.add(name)
                continue
            cost = 4 * 4 / 3 * count * (queries + keys) * source.call.query.shape[-1]
            if cost > left:
                without.add(name)
                continue
            try:
                factors_of(name, heads, spans(heads))
            except ArgumentError:
                without.add(name)
            else:
                left -= cost
                chosen[name] = None
    # A name covers the maps of all examples.
    return [name for name in chosen if name not in without]
