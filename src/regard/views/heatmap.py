"""Heatmaps of attention with matplotlib: queries down, keys across, a token at every tick.

Figures are made without pyplot: nothing here selects a backend, keeps a figure alive or changes an rcParam. So the
functions work in a script without a screen, in a notebook, and in a figure of your own.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.errors import ArgumentError, MissingExtraError, ShapeError
from regard.views.colours import ramp
from regard.views.fonts import Lettering, letter
from regard.views.labels import printable, right_to_left, width
from regard.views.layout import (
    COLOUR_BAR,
    FONT_POINTS,
    GLYPH,
    LABEL_CHARACTERS,
    MARGIN,
    TITLE_POINTS,
    Box,
    flow,
    label_step,
    panel_size,
    upright,
)
from regard.views.values import Picture, Pooling, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

STROKE_POINTS = 0.3
"""Width of a stroke in points: matplotlib draws Noto Sans CJK thin; the stroke makes it as heavy as other fonts."""

ALONE, IN_GRID = 11.0, 5.0
"""The longest side of a map in inches: if it is alone in its figure, and in a grid."""


class Panel(NamedTuple):
    """One map of a grid, with its own labels."""

    weights: Any
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    title: str = ""


def heatmap(
    weights: Any,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    ax: "Axes | None" = None,
    title: str = "",
    limits: tuple[float, float] = (0.0, 1.0),
    colour_map: "str | Colormap | None" = None,
    max_cells: int = 256,
    pooling: Pooling = "max",
) -> "Axes":
    """Draw one map: the weight that each query (down) gives to each key (across).

    The first key is at the left; if the labels are of a right-to-left script it is at the right, as a reader of that
    script expects. Labels are left out where they would touch. A map with a side over `max_cells` is pooled exactly,
    and the title says so.

    Args:
        weights: (T, S), an `AttentionMap`, a tensor or an array.
        rows: T labels, or None for positions from 0.
        columns: S labels, or None for positions from 0.
        ax: the axes to draw into; None makes a new figure of the right size, which is `.figure` of the result.
        title: printed above the map.
        limits: the weights at the two ends of the colours; an end of the colour bar is pointed if some weights lie
            beyond it.
        colour_map: a matplotlib colour map or its name; None for the one of regard, white to dark in even steps.
        max_cells: the most cells on a side; a longer side is pooled.
        pooling: the value of a pooled cell: the largest weight ("max"), or the sum over its keys averaged
            over its queries ("mass").

    Returns:
        The axes; `.figure.savefig(path)` writes a figure that was made here.

    Raises:
        ShapeError: `weights` is not one non-empty matrix of real numbers, or there is not one label for each token.
        NonFiniteError: a weight is NaN or infinite.
        ArgumentError: an argument is out of its range.
        NotKeptError: only statistics were kept of the map, and this picture is not among them.
        MissingExtraError: matplotlib is not installed.

    >>> import torch
    >>> axes = heatmap(torch.eye(3), ["le", "chat", "dort"], ["the", "cat", "sleeps"])
    >>> [label.get_text() for label in axes.get_xticklabels()]
    ['the', 'cat', 'sleeps']
    """
    require_matplotlib()
    drawn = picture(weights, rows, columns, max_cells=max_cells, pooling=pooling)
    name = _title(title, drawn, pooling)
    if ax is None:
        size = panel_size(drawn, name, longest_side=ALONE)
        figure, (ax,) = new_figure(*flow([size]))
        image, missing = _draw(ax, drawn, name, limits=limits, colour_map=colour_map)
        _colour_bar(image, [drawn], limits, cax=foot(figure))
    else:
        image, missing = _draw(ax, drawn, name, limits=limits, colour_map=colour_map)
        _colour_bar(image, [drawn], limits, ax=ax)
    warn_of_missing(missing)
    return ax


def heatmap_grid(
    panels: Iterable[Panel],
    *,
    title: str = "",
    across: int | None = None,
    limits: tuple[float, float] = (0.0, 1.0),
    colour_map: "str | Colormap | None" = None,
    max_cells: int = 128,
    pooling: Pooling = "max",
) -> "Figure":
    """Draw several maps in one figure under one colour bar: the heads of a layer, a dozen sentences.

    Args:
        panels: the maps with their labels and titles; `head_panels` makes them from one layer.
        title: printed above the grid.
        across: panels in a row; None fills the rows as words fill the lines of a paragraph.
        limits: as in `heatmap`, one pair for all panels.
        colour_map: as in `heatmap`.
        max_cells: the most cells on a side of a panel; a longer side is pooled.
        pooling: as in `heatmap`.

    Returns:
        A new figure; `.savefig(path)` writes it, in the format that the path's ending names.

    Raises:
        ShapeError, NonFiniteError, NotKeptError, MissingExtraError: as in `heatmap`.
        ArgumentError: there are no panels, or `across` is under 1.

    >>> import torch
    >>> figure = heatmap_grid(head_panels(torch.eye(3).expand(4, 3, 3)), title="layer 0")
    >>> [axes.get_title(loc="left") for axes in figure.axes[:4]]
    ['head 0', 'head 1', 'head 2', 'head 3']
    """
    require_matplotlib()
    panels = list(panels)
    if not panels or (across is not None and across < 1):
        raise ArgumentError(f"a grid needs panels and at least 1 across; got {len(panels)} and {across}")
    drawn = [picture(p.weights, p.rows, p.columns, max_cells=max_cells, pooling=pooling) for p in panels]
    names = [_title(panel.title, shown, pooling) for panel, shown in zip(panels, drawn, strict=True)]
    sizes = [panel_size(shown, name, longest_side=IN_GRID) for shown, name in zip(drawn, names, strict=True)]
    figure, axes = new_figure(*flow(sizes, across=across, title=GLYPH * 1.4 * width(title)))
    missing = write_heading(figure, title) if title else ""
    for ax, shown, name in zip(axes, drawn, names, strict=True):
        image, unknown = _draw(ax, shown, name, limits=limits, colour_map=colour_map)
        missing += unknown
    _colour_bar(image, drawn, limits, cax=foot(figure))
    warn_of_missing(missing)
    return figure


def head_panels(weights: Any, rows: Sequence[str] | None = None, columns: Sequence[str] | None = None) -> list[Panel]:
    """The heads of one layer as the panels of a grid.

    Args:
        weights: (heads, T, S), an `AttentionMap`, a tensor or an array.
        rows: T labels, the same for every head.
        columns: S labels.

    Raises:
        ShapeError: `weights` has not three dimensions.
    """
    shape = tuple(getattr(weights, "shape", ()))
    if len(shape) != 3:
        raise ShapeError(f"weights must be one layer of shape (heads, queries, keys); got {shape}")
    return [Panel(weights[head], rows, columns, f"head {head}") for head in range(shape[0])]


def require_matplotlib() -> None:
    """Raise an error if matplotlib is not installed.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("matplotlib", extra="view") from error


def new_figure(outline: Box, boxes: Sequence[Box]) -> "tuple[Figure, list[Axes]]":
    """A figure of the size of the outline, with axes in the boxes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(outline.width, outline.height), dpi=150, facecolor="white")
    return figure, [figure.add_axes(_fractions(outline, box)) for box in boxes]


def _fractions(outline: Box, box: Box) -> tuple[float, float, float, float]:
    """A box in the coordinates of matplotlib: shares of the figure, from the bottom left."""
    bottom = outline.height - box.top - box.height
    return (
        box.left / outline.width,
        bottom / outline.height,
        box.width / outline.width,
        box.height / outline.height,
    )


def write_heading(figure: "Figure", title: str) -> str:
    """Print the title of the figure at its top left, and return the characters that no font has."""
    (lettering,) = letter([title])
    across, height = figure.get_size_inches()
    figure.text(
        MARGIN / across,
        1 - MARGIN / height,
        lettering.text,
        va="top",
        parse_math=False,
        fontsize=TITLE_POINTS + 2,
        **text_style(lettering),
    )
    return lettering.missing


def foot(figure: "Figure") -> "Axes":
    """Axes for the colour bar, at the bottom left of the figure."""
    across, height = figure.get_size_inches()
    outline = Box(0, 0, across, height)
    length = min(2.2, across - 4 * MARGIN)
    return figure.add_axes(_fractions(outline, Box(2 * MARGIN, height - COLOUR_BAR - 0.02, length, 0.09)))


def _draw(
    ax: "Axes", drawn: Picture, title: str, *, limits: tuple[float, float], colour_map: "str | Colormap | None"
) -> tuple[Any, str]:
    """Draw a picture into the axes, and return the image and the characters that no font has."""
    image = ax.imshow(
        drawn.values,
        vmin=limits[0],
        vmax=limits[1],
        cmap=our_colours() if colour_map is None else colour_map,
        interpolation="nearest",
        aspect="auto",
    )
    if right_to_left(drawn.columns):
        ax.invert_xaxis()
    ax.xaxis.tick_top()
    ax.tick_params(length=2, width=0.5, pad=2, color="0.4")
    for spine in ax.spines.values():
        spine.set(linewidth=0.5, color="0.4")
    missing = _label_axis(ax, "y", drawn.rows) + _label_axis(ax, "x", drawn.columns)
    if title:
        (lettering,) = letter([title])
        missing += lettering.missing
        ax.set_title(lettering.text, loc="left", fontsize=TITLE_POINTS, parse_math=False, **text_style(lettering))
    return image, missing


def our_colours() -> "Colormap":
    """The colour map of regard: white to dark, in even steps."""
    from matplotlib.colors import ListedColormap

    return ListedColormap(ramp(), name="regard")


def _label_axis(ax: "Axes", axis: str, labels: Sequence[str]) -> str:
    """Put the labels on one axis, or every n-th if they would touch, and return the characters that no font has."""
    side = _inches(ax, axis)
    positions = range(0, len(labels), label_step(len(labels), side))
    shown = letter([printable(labels[position], limit=LABEL_CHARACTERS) for position in positions])
    ticks = ax.xaxis if axis == "x" else ax.yaxis
    ticks.set_ticks(positions, [lettering.text for lettering in shown], parse_math=False)
    turned = axis == "x" and not upright(labels, side)
    for label, lettering in zip(ticks.get_majorticklabels(), shown, strict=True):
        label.set(fontsize=FONT_POINTS, rotation=90 if turned else 0, **text_style(lettering))
    return "".join(lettering.missing for lettering in shown)


def _inches(ax: "Axes", axis: str) -> float:
    """The length of an axis in inches."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    across, height = figure.get_size_inches()
    box = ax.get_position()
    return float(across * box.width if axis == "x" else height * box.height)


def text_style(lettering: Lettering) -> dict[str, Any]:
    """The fonts and the stroke with which a text is drawn."""
    from matplotlib.patheffects import withStroke

    stroke = [withStroke(linewidth=STROKE_POINTS, foreground="black")] if lettering.thin else []
    return {"fontfamily": list(lettering.families), "path_effects": stroke}


def _title(title: str, drawn: Picture, pooling: Pooling) -> str:
    """The title; if a cell stands for several weights, with a note that says for how many."""
    if drawn.block == (1, 1):
        return title
    most = "" if drawn.is_even else "up to "
    note = f"{pooling} of {most}{drawn.block[0]} × {drawn.block[1]} weights a cell"
    return f"{title} ({note})" if title else note


def _colour_bar(image: Any, drawn: Sequence[Picture], limits: tuple[float, float], **where: Any) -> None:
    colour_bar(
        image, min(float(d.values.min()) for d in drawn), max(float(d.values.max()) for d in drawn), limits, **where
    )


def colour_bar(image: Any, lowest: float, highest: float, limits: tuple[float, float], **where: Any) -> None:
    """The bar of an image with values from lowest to highest. An end is pointed if values lie beyond that limit."""
    below, above = lowest < limits[0], highest > limits[1]
    extend = ("both" if above else "min") if below else ("max" if above else "neither")
    flat = "cax" in where
    bar = image.figure.colorbar(
        image, extend=extend, orientation="horizontal" if flat else "vertical", label="attention weight", **where
    )
    bar.ax.tick_params(labelsize=FONT_POINTS - 1, length=2, width=0.5, pad=1, color="0.4")
    (bar.ax.xaxis if flat else bar.ax.yaxis).label.set(fontsize=FONT_POINTS)
    bar.outline.set(linewidth=0.5, edgecolor="0.4")


def warn_of_missing(missing: str) -> None:
    """Warn of the characters that no font has."""
    if missing:
        warnings.warn(
            f"no font has {' '.join(dict.fromkeys(missing))}: labelled by code point. pip install "
            "'regard[view]' brings Noto; the HTML page shows every script that the browser has",
            stacklevel=3,
        )
