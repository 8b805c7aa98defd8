"""Heatmaps of attention with matplotlib: queries down, keys across, a token at every tick."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.call.masks.base import Mask
from regard.errors import ArgumentError, ShapeError, require
from regard.tensors.kinds import refuse_wrong_kinds
from regard.views.axis_text import FONT_POINTS, LINE, TITLE_POINTS, AxisLabel, room, short_title, shown
from regard.views.colours import LIGHT, Theme
from regard.views.drawing import Colouring, Drawn, Panel, drawn, limits_of
from regard.views.figures import (
    colour_bar,
    colours_of,
    foot,
    frame,
    framed,
    heading_inches,
    norm_of,
    require_axes,
    require_matplotlib,
    sized_figure,
    text_style,
    warn_of_missing,
    write_title,
)
from regard.views.fonts import letter
from regard.views.layout import FigureSize, Sides, flow, panel_size
from regard.views.scales import ColourScale, Limits, ScaleName
from regard.views.values import Pooling

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

ALONE, IN_GRID, ANNOTATED = Sides(3.2, 8.0), Sides(1.6, 5.0), Sides(3.2, 5.0)
"""The sides of a map that is alone in its figure, and of one in a grid without and with numbers in its cells."""
AXIS_TITLES = ("looks at", "is looked at")
LEAST_POINTS = 4.5
"""The smallest font of a number."""
CHARACTERS = 5.2
"""The width of a cell in halves of a font size: four digits with a point, and their margins."""
MOST_NUMBERS = 4_096
"""The most cells with numbers: more are too many to read, and take seconds to draw."""
OURS = "regard heatmap"
"""Marks our image in the axes, for a second heatmap to replace."""


@refuse_wrong_kinds
def heatmap(
    weights: Any,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    ax: "Axes | None" = None,
    title: str = "",
    scale: ScaleName | ColourScale = "sqrt",
    limits: tuple[float, float] | None = None,
    without_sink: bool = False,
    mask: Any = None,
    colour_bar: bool = True,
    axis_titles: tuple[str, str] = AXIS_TITLES,
    annotate: bool = False,
    figsize: tuple[float, float] | None = None,
    theme: Theme = LIGHT,
    max_cells: int = 256,
    pooling: Pooling = "max",
) -> "Axes":
    """Draw one map: the weight of each query (down) for each key (across).

    Keys stand in the reading order of their script: Hebrew and Arabic from right to left, with their numbers from left
    to right (`regard.views.visual_order`). Labels that would touch are left out; labels that do not fit are turned, one
    by one. A map with a side over `max_cells` is pooled exactly, and the title says so. Masked cells are hatched,
    unlike weights of 0.

    Args:
        weights: (T, S), an `AttentionMap`, a tensor, an array or lists, with or without batches and heads of one
            before it; or the only map of a watch, of several maps, or of a model with its inputs; or a mask, of which
            as many queries and keys are drawn as there are labels, or 12. Values below 0 get colours of their own.
        rows: T labels, or None for positions from 0.
        columns: S labels, or None for positions from 0.
        ax: the axes to draw into, replacing an earlier heatmap; None makes a new figure of the right size, the
            `.figure` of the result.
        title: printed above the map.
        scale: the colours of weights: "sqrt", "linear", "log", "row" (each query by its largest weight), or
            a `ColourScale`.
        limits: the weights at the two ends of the colours; None for 0 and the largest weight. An end of the colour bar
            is pointed if weights lie beyond it.
        without_sink: leave the first key, the usual attention sink, out of the limits.
        mask: the mask of the call, as in `regard.attention`; an `AttentionMap` brings its own.
        colour_bar: whether to draw a bar of colours with its values; a mask has none.
        axis_titles: the titles of the queries and of the keys; ("", "") for none.
        annotate: print each weight in its cell, with two decimals, where it fits.
        figsize: the width and height of the new figure in inches; None for cells of a good size.
        theme: `LIGHT` or `DARK` of `regard.views`, or your own.
        max_cells: the most cells on a side; a longer side is pooled.
        pooling: the value of a pooled cell: the largest weight ("max"), or the sum over its keys averaged
            over its queries ("mass").

    Returns:
        The axes, which a notebook shows as their figure; `save_figure(axes, path)` writes it.

    Raises:
        ShapeError: `weights` is not one non-empty real matrix, the labels are not one per token, or the mask does not
            fit.
        NonFiniteError: a weight is NaN or infinite.
        ArgumentError: an argument is out of its range.
        NotKeptError: the recording holds only statistics of the map, without this picture.
        MissingExtraError: matplotlib is not installed.

    >>> import torch
    >>> axes = heatmap(torch.eye(3), ["le", "chat", "dort"], ["the", "cat", "sleeps"])
    >>> [label.get_text() for label in axes.get_xticklabels()]
    ['the', 'cat', 'sleeps']
    """
    require_axes(ax)
    colour_bar = colour_bar and not isinstance(weights, Mask)
    look = Colouring.chosen(scale, limits, without_sink, theme)
    one = drawn(Panel(weights, rows, columns, title, mask), look, max_cells=max_cells, pooling=pooling)
    if ax is not None and figsize is not None:
        raise ArgumentError("figsize= is the size of a new figure; the axes of ax= have theirs")
    if figsize is not None:
        _, ax = sized_figure(figsize, theme)
    if ax is None:
        size = size_of(one, ALONE, axis_titles=LINE * 1.3 if any(axis_titles) else 0.0)
        figure, (ax,), _ = framed(*flow([size], has_bar=colour_bar), theme)
        _name_axes(ax, axis_titles, theme)
        missing = draw_maps([ax], [one], look, figure if colour_bar else None, titled=True)
    else:
        _remove_earlier(ax)
        _name_axes(ax, axis_titles, theme)
        missing = _draw_into(ax, one, look, colour_bar)
    if annotate:
        write_weights(ax, one)
    warn_of_missing(missing)
    return ax


@refuse_wrong_kinds
def heatmap_grid(
    panels: Iterable[Panel | Any],
    *,
    title: str = "",
    across: int | None = None,
    scale: ScaleName | ColourScale = "sqrt",
    limits: tuple[float, float] | None = None,
    without_sink: bool = False,
    colour_bar: bool = True,
    annotate: bool = False,
    theme: Theme = LIGHT,
    max_cells: int = 128,
    pooling: Pooling = "max",
) -> "Figure":
    """Draw several maps in one figure under one colour bar: the heads of a layer, a dozen sentences.

    Args:
        panels: the maps with their labels and titles, which `head_panels` makes from one layer; or maps alone, each as
            for `heatmap`.
        title: printed above the grid.
        across: panels in a row; None fills the rows as words fill the lines of a paragraph.
        limits: as in `heatmap`, one pair for all panels.
        scale, without_sink, colour_bar, annotate, theme, pooling: as in `heatmap`.
        max_cells: the most cells on a side of a panel; a longer side is pooled.

    Returns:
        A new figure; `save_figure(figure, path)` writes it.

    Raises:
        ShapeError, NonFiniteError, NotKeptError, MissingExtraError: as in `heatmap`.
        ArgumentError: there are no panels, or an argument is out of its range.

    >>> import torch
    >>> figure = heatmap_grid(head_panels(torch.eye(3).expand(4, 3, 3)), title="layer 0")
    >>> [axes.get_title(loc="left") for axes in figure.axes[:4]]
    ['head 0', 'head 1', 'head 2', 'head 3']
    """
    require_matplotlib()
    look = Colouring.chosen(scale, limits, without_sink, theme)
    require(panels, Iterable, "panels", "a list of maps")
    panels = [one if isinstance(one, Panel) else Panel(one) for one in panels]
    if not panels or (across is not None and across < 1):
        raise ArgumentError(f"a grid needs panels and at least 1 across; got {len(panels)} and {across}")
    maps = [drawn(panel, look, max_cells=max_cells, pooling=pooling) for panel in panels]
    title = short_title(title)
    sizes = [size_of(one, ANNOTATED if annotate else IN_GRID) for one in maps]
    placed = flow(sizes, across=across, title=heading_inches(title), has_bar=colour_bar)
    figure, axes, missing = framed(*placed, theme, title)
    missing += draw_maps(axes, maps, look, figure if colour_bar else None)
    if annotate:
        for ax, one in zip(axes, maps, strict=True):
            write_weights(ax, one)
    warn_of_missing(missing)
    return figure


def head_panels(
    weights: Any, rows: Sequence[str] | None = None, columns: Sequence[str] | None = None, *, mask: Any = None
) -> list[Panel]:
    """The heads of one layer as the panels of a grid.

    Args:
        weights: (heads, T, S), an `AttentionMap`, a tensor or an array.
        rows: T labels, the same for every head.
        columns: S labels.
        mask: as in `heatmap`, one for all heads.

    Raises:
        ShapeError: `weights` has not three dimensions.
    """
    shape = tuple(getattr(weights, "shape", ()))
    if len(shape) != 3:
        raise ShapeError(f"weights must be one layer of shape (heads, queries, keys); got {shape}")
    return [Panel(weights[head], rows, columns, f"head {head}", mask) for head in range(shape[0])]


def size_of(one: Drawn, sides: Sides, *, axis_titles: float = 0.0) -> FigureSize:
    (title,) = letter([one.title])
    return panel_size(one.rows, one.columns, title.inches(TITLE_POINTS), sides=sides, axis_titles=axis_titles)


def draw_maps(
    axes: "Sequence[Axes]", maps: Sequence[Drawn], look: Colouring, figure: "Figure | None", *, titled: bool = False
) -> str:
    limits = limits_of(maps, look)
    images = [_draw(ax, one, look, limits) for ax, one in zip(axes, maps, strict=True)]
    missing = "".join(_label(ax, one, look.theme) for ax, one in zip(axes, maps, strict=True))
    if figure is not None:
        span = min(one.lowest for one in maps), max(one.highest for one in maps)
        has_masked = any(one.hidden.any() for one in maps)
        foot(figure, images[0], span, limits, look, look.note(titled=titled), has_masked=has_masked)
    return missing


def _draw_into(ax: "Axes", one: Drawn, look: Colouring, with_bar: bool) -> str:
    figure = ax.get_figure(root=True)
    assert figure is not None
    if figure.get_layout_engine() is None and _is_untouched(figure):
        # Without a layout, the labels of a map are cut off and its bar lies on the next plot.
        with contextlib.suppress(RuntimeError):  # there is a bar of the caller's, whose place is settled
            figure.set_layout_engine("constrained")
    limits = limits_of([one], look)
    image = _draw(ax, one, look, limits)
    image.set_gid(OURS)
    if with_bar:
        colour_bar(image, (one.lowest, one.highest), limits, look, look.note(titled=True), ax=ax)
    missing = _label(ax, one, look.theme)
    if (layout := figure.get_layout_engine()) is not None:
        from regard.views.artists import Fitting

        # The labels take room of the map, and then others of them fit; more axes may come until the figure is drawn.
        layout.execute(figure)
        _label(ax, one, look.theme)
        # Not the title: its place is settled before the labels are drawn, and a new title would lie on them.
        fitting = Fitting(lambda: _label_axes(ax, one, look.theme))
        fitting.set_gid(OURS)
        ax.add_artist(fitting)
    return missing


def _name_axes(ax: "Axes", titles: tuple[str, str], theme: Theme) -> None:
    ax.set_ylabel(titles[0], fontsize=FONT_POINTS, color=theme.ink)
    ax.set_xlabel(titles[1], fontsize=FONT_POINTS, color=theme.ink)
    ax.xaxis.set_label_position("top")


def _remove_earlier(ax: "Axes") -> None:
    for artist in ax.get_children():
        if artist.get_gid() == OURS:
            if (bar := getattr(artist, "colorbar", None)) is not None:
                bar.remove()
            artist.remove()


def _is_untouched(figure: "Figure") -> bool:
    from matplotlib.gridspec import SubplotParams

    return vars(figure.subplotpars) == vars(SubplotParams())


def _draw(ax: "Axes", one: Drawn, look: Colouring, limits: Limits) -> "AxesImage":
    image = ax.imshow(
        np.ma.array(one.values, mask=one.hidden),
        norm=norm_of(look.scale, limits),
        cmap=colours_of(look, limits),
        interpolation="nearest",
        aspect="auto",
    )
    if one.hidden.any():
        ax.patch.set(facecolor=look.theme.masked, hatch="////", edgecolor=look.theme.hatch, linewidth=0)
        ax.patch.set_hatch_linewidth(0.4)
    else:
        ax.patch.set(facecolor=look.theme.paper, hatch=None)
    ax.xaxis.tick_top()
    frame(ax, look.theme)
    return image


def _label(ax: "Axes", one: Drawn, theme: Theme) -> str:
    return _label_axes(ax, one, theme) + write_title(ax, one.title, theme)


def _label_axes(ax: "Axes", one: Drawn, theme: Theme) -> str:
    return _label_axis(ax, "y", one.rows, theme) + _label_axis(ax, "x", one.columns, theme)


def _label_axis(ax: "Axes", axis: str, labels: Sequence[AxisLabel], theme: Theme) -> str:
    side = _inches(ax, axis)
    between = room(len(labels), side) if axis == "x" else float("inf")
    places, some = zip(*shown(labels, side), strict=True)
    ticks = ax.xaxis if axis == "x" else ax.yaxis
    ticks.set_ticks(places, [label.written(between) for label in some], parse_math=False)
    for text, label in zip(ticks.get_majorticklabels(), some, strict=True):
        turned = label.turn(between) == "turned"
        text.set(fontsize=FONT_POINTS, rotation=90 if turned else 0, **text_style(label.lettering, theme))
        if label.turn(between) == "stacked":
            text.set_linespacing(1.15)
    return "".join(label.lettering.missing for label in some)


def _inches(ax: "Axes", axis: str) -> float:
    figure = ax.get_figure(root=True)
    assert figure is not None
    across, height = figure.get_size_inches()
    box = ax.get_position()
    return float(across * box.width if axis == "x" else height * box.height)


def write_weights(ax: "Axes", one: Drawn) -> None:
    """Print each weight that is not masked in its cell; nothing where a cell is too small for it."""
    from regard.views.artists import Fitting

    if one.values.size > MOST_NUMBERS:
        return
    image = ax.get_images()[-1]
    texts = []
    for row, column in zip(*(~one.hidden).nonzero(), strict=True):
        red, green, blue, _ = image.cmap(image.norm(one.values[row, column]))
        is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        colour = "white" if is_dark else "black"
        number = f"{one.values[row, column]:.2f}"
        texts.append(ax.text(column, row, number, ha="center", va="center", color=colour, clip_on=True))

    def fit() -> None:
        figure = ax.get_figure(root=True)
        assert figure is not None
        width, height = figure.get_size_inches()
        box = ax.get_position()
        rows, columns = one.values.shape
        cell = min(width * box.width / columns * 2 / CHARACTERS, height * box.height / rows / 1.3)
        points = min(FONT_POINTS, 72 * cell)
        for text in texts:
            text.set(fontsize=points, visible=points >= LEAST_POINTS)

    fit()
    ax.add_artist(Fitting(fit))
