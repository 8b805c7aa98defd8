"""Objects in a notebook: maps and masks as pictures, tables as HTML, reports as text, each beside its plain repr."""

from functools import singledispatch
from html import escape
from typing import TYPE_CHECKING, Any

from regard.call.masks.base import Mask
from regard.errors import MissingExtraError, RegardError
from regard.lazy import Bundle
from regard.maps.attention_map import AttentionMap
from regard.views.examples import of_sequence
from regard.views.figures import require_matplotlib
from regard.views.heatmap import head_panels, heatmap, heatmap_grid
from regard.views.model import model_grid
from regard.watching.analysis.tables import HeadTable
from regard.watching.watch import Seen

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LABELLED = 4
"""The most heads that are drawn with a label at each query and key."""
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
    """The heads of the first sequence: a few with labels, many side by side without."""
    require_matplotlib()
    if len(shown.shape) == 2:
        return _picture(heatmap(shown, max_cells=4 * CELLS).get_figure(root=True))
    heads, batch = of_sequence(shown, 0), shown.leading[:-1]
    title = f"sequence 0 of {' x '.join(map(str, batch))}" if any(size > 1 for size in batch) else ""
    if heads.shape[0] > MOST_LABELLED or max(heads.shape[-2:]) > CELLS:
        return _picture(model_grid({"heads": heads}, cells=CELLS, title=title))
    return _picture(heatmap_grid(head_panels(heads), title=title))


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
    header, *lines = str(shown).splitlines()
    names = header.split()
    rows = [line.split() for line in lines]
    cells = [row for row in rows if len(row) == len(names)][:MOST_ROWS]
    rest = [line for line, row in zip(lines, rows, strict=True) if len(row) != len(names)]
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    below = "".join(f"<p>{escape(line)}</p>" for line in rest)
    return {"text/html": f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"}, {}
