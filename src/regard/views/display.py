"""Objects in a notebook: maps and masks as pictures, tables as HTML, reports as text, each beside its plain repr."""

from functools import singledispatch
from html import escape
from typing import TYPE_CHECKING, Any

from regard.call.masks.base import Mask
from regard.errors import MissingExtraError, RegardError
from regard.lazy import Bundle
from regard.maps.attention_map import AttentionMap
from regard.views.figures import require_matplotlib
from regard.views.heatmap import head_panels, heatmap, heatmap_grid
from regard.views.model import model_grid, of_sequence
from regard.watching.analysis.tables import HeadTable
from regard.watching.watch import Seen

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_HEADS = 12
"""The most heads in the picture of a map."""
CELLS = 64
"""The most cells on a side of a head."""
MOST_ROWS = 40
"""The most rows of a table."""


def bundle(shown: Any) -> Bundle:
    """The display of an object, by MIME type, with its metadata. An error while drawing becomes a line below the repr.

    >>> import regard
    >>> data, _ = bundle(regard.causal())
    >>> sorted(data)
    ['image/png', 'text/plain']
    """
    plain = repr(shown)
    try:
        data, metadata = _drawn(shown)
    except MissingExtraError as error:
        return {"text/plain": f"{plain}\n(no picture: {error})"}, {}
    except (RegardError, RuntimeError, IndexError) as error:
        return {"text/plain": f"{plain}\n(no picture: {str(error).splitlines()[0]})"}, {}
    return {**data, "text/plain": plain}, metadata


@singledispatch
def _drawn(shown: Any) -> Bundle:
    """An object whose `str` is the longer form of its repr."""
    style = "white-space: pre; overflow-x: auto; line-height: 1.3"
    return {"text/html": f'<pre style="{style}">{escape(str(shown))}</pre>'}, {}


def _picture(figure: "Figure | None") -> Bundle:
    from regard.views.shown import png_bundle

    assert figure is not None
    return png_bundle(figure)


@_drawn.register(AttentionMap)
def _of_map(shown: AttentionMap) -> Bundle:
    """The heads of the first sequence; of many heads the first."""
    require_matplotlib()
    if len(shown.shape) == 2:
        return _picture(heatmap(shown, max_cells=4 * CELLS).get_figure(root=True))
    heads = of_sequence(shown, 0)
    count, batch = heads.shape[0], shown.leading[:-1]
    first = f"{MOST_HEADS} of {count} heads" if count > MOST_HEADS else ""
    title = ", ".join(
        part for part in (f"sequence 0 of {tuple(batch)}" if batch and batch != (1,) else "", first) if part
    )
    return _picture(heatmap_grid(head_panels(heads)[:MOST_HEADS], title=title, max_cells=CELLS))


@_drawn.register(Mask)
def _of_mask(shown: Mask) -> Bundle:
    require_matplotlib()
    return _picture(heatmap(shown, title=str(shown), colour_bar=False).get_figure(root=True))


@_drawn.register(Seen)
def _of_seen(shown: Seen) -> Bundle:
    require_matplotlib()
    return _picture(model_grid(shown, cells=CELLS, title=type(shown.modules[""]).__name__))


@_drawn.register(HeadTable)
def _of_table(shown: HeadTable) -> Bundle:
    header, *lines = [line.split() for line in str(shown).splitlines()]
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines[:MOST_ROWS]
    )
    names = "".join(f"<th>{escape(name)}</th>" for name in header)
    return {"text/html": f"<table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>"}, {}
