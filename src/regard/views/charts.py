"""Plots about maps: margins beside an alignment, positions, the row that shows a fault of an audit."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import ArgumentError, NonFiniteError, ShapeError, require
from regard.tensors.kinds import refuse_wrong_kinds
from regard.views.axis_text import FONT_POINTS
from regard.views.colours import LIGHT, Theme
from regard.views.drawing import Colouring, Panel, drawn
from regard.views.figures import (
    frame,
    framed,
    heading_inches,
    require_matplotlib,
    warn_of_missing,
)
from regard.views.heatmap import ALONE, draw_maps, size_of
from regard.views.layout import COLOUR_BAR, GAP, MARGIN, NARROWEST, Box
from regard.views.scales import ColourScale, ScaleName, numeral
from regard.watching.checks.finding import Finding

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARGINAL = 0.7
"""Inches of the bars beside an alignment."""
PLOT = (5.2, 2.8)
"""Inches across and down of a plot of bars."""
MOST_PAIRED = 256
"""The most queries and keys of an alignment with margins: it is never pooled."""


@refuse_wrong_kinds
def alignment(
    weights: Any,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    title: str = "",
    scale: ScaleName | ColourScale = "sqrt",
    theme: Theme = LIGHT,
) -> "Figure":
    r"""Draw one map with two margins: the received weight of each key below it, and the entropy of each query beside
    it.

    A key without weight was not translated; a query of high entropy attends to nothing in particular.

    Args:
        weights: (T, S), an `AttentionMap`, a tensor or an array of weights from 0 up; T and S are at most 256.
        rows: T labels.
        columns: S labels.
        title: printed above.
        scale: the colour of a weight, as in `heatmap`.
        theme: `LIGHT` or `DARK`.

    Returns:
        A new figure with four axes: the map, $\sum_i P_{ij}$ of each key, $-\sum_j P_{ij} \ln P_{ij}$ of each query in
        nats, and the colour bar.

    Raises:
        RegardError: as `heatmap`; ArgumentError if a weight is below 0 or a side is longer than 256.

    >>> figure = alignment(np.array([[0.5, 0.5], [1.0, 0.0]]), ["we", "sleep"], ["nous", "dormons"])
    >>> [round(float(bar.get_height()), 2) for bar in figure.axes[1].patches]
    [1.5, 0.5]
    """
    require_matplotlib()
    look = Colouring.chosen(scale, None, False, theme)
    shape = tuple(getattr(weights, "shape", ()))
    if len(shape) == 2 and max(shape) > MOST_PAIRED:
        raise ArgumentError(
            f"an alignment has at most {MOST_PAIRED} queries and keys; got {shape}: draw it with heatmap()"
        )
    one = drawn(Panel(weights, rows, columns), look, max_cells=MOST_PAIRED, pooling="max")
    even = Colouring.chosen("linear", None, False, theme)
    numbers = drawn(Panel(weights), even, max_cells=MOST_PAIRED, pooling="max").values[:, one.order]
    if numbers.min() < 0:
        raise ArgumentError(f"an alignment has weights from 0 up; got {numbers.min()}")
    size = size_of(one, ALONE)
    top = MARGIN + size.above + (0.3 if title else 0.0)
    boxes = [
        Box(MARGIN + size.left, top, size.width, size.height),
        Box(MARGIN + size.left, top + size.height + 0.06, size.width, MARGINAL),
        Box(MARGIN + size.left + size.width + 0.06, top, MARGINAL, size.height),
    ]
    wide = max(MARGIN + size.left + size.width + MARGINAL + 2 * GAP, NARROWEST, heading_inches(title) + 2 * MARGIN)
    tall = top + size.height + MARGINAL + GAP + COLOUR_BAR + MARGIN
    figure, (main, below, beside), missing = framed(Box(0, 0, wide, tall), boxes, theme, title)
    missing += draw_maps([main], [one], look, figure)
    logs = np.log(numbers, out=np.zeros_like(numbers), where=numbers > 0)
    _bars(below, numbers.sum(0), theme, "received", is_flat=False)
    _bars(beside, -(numbers * logs).sum(1), theme, "entropy, nats", is_flat=True)
    warn_of_missing(missing)
    return figure


def _bars(ax: "Axes", numbers: Any, theme: Theme, name: str, *, is_flat: bool) -> None:
    places, colour = np.arange(len(numbers)), theme.accents[0]
    (ax.barh if is_flat else ax.bar)(places, numbers, 0.8, color=colour, linewidth=0)
    plain(ax, theme)
    ends = (-0.5, len(numbers) - 0.5)
    largest = float(np.max(numbers, initial=0.0)) or 1.0
    if is_flat:
        ax.set(ylim=ends[::-1], xlim=(0, 1.05 * largest), yticks=[], xticks=[0, largest])
        ax.set_xticklabels(["0", numeral(largest)])
    else:
        # From the map downwards.
        ax.set(xlim=ends, ylim=(1.05 * largest, 0), xticks=[], yticks=[0, largest])
        ax.set_yticklabels(["0", numeral(largest)])
    ax.set_xlabel(name, fontsize=FONT_POINTS - 1, color=theme.ink)


@refuse_wrong_kinds
def position_table(table: Tensor, *, title: str = "", theme: Theme = LIGHT) -> "Figure":
    """Draw a table of positions: its values, and the cosine similarity of any two positions.

    Args:
        table: (T, D), one vector a position, such as `model.embed_positions.weight`, or `rotary` angles.
        title: printed above.
        theme: `LIGHT` or `DARK`.

    Returns:
        A new figure: positions down and dimensions across, and the cosines of all pairs of positions.

    Raises:
        ShapeError: it is no table.
        NonFiniteError: a number is NaN or infinite.

    >>> figure = position_table(torch.randn(16, 8))
    >>> [ax.get_title(loc="left") for ax in figure.axes[:2]]
    ['numbers: positions by dimensions', 'cosines of positions']
    """
    require_matplotlib()
    if not isinstance(table, Tensor) or table.dim() != 2 or 0 in table.shape:
        raise ShapeError(f"a table of positions is a tensor (T, D); got {tuple(getattr(table, 'shape', ()))}")
    numbers = table.detach().cpu().double()
    if not torch.isfinite(numbers).all():
        raise NonFiniteError("a table of positions must be finite; NaN or infinity came")
    unit = torch.nn.functional.normalize(numbers, dim=-1)
    look = Colouring.chosen("linear", None, False, theme)
    panels = [
        Panel(numbers, title="numbers: positions by dimensions"),
        Panel(unit @ unit.T, title="cosines of positions"),
    ]
    maps = [drawn(panel, look, max_cells=256, pooling="max") for panel in panels]
    tall = 3.2
    top = MARGIN + 0.6 + (0.3 if title else 0.0)
    boxes = [Box(0.7, top, tall, tall), Box(0.7 + tall + 1.6, top, tall, tall)]
    figure, axes, missing = framed(Box(0, 0, 2 * tall + 3.6, top + tall + 2 * MARGIN), boxes, theme, title)
    for ax, one in zip(axes, maps, strict=True):
        missing += draw_maps([ax], [one], look, None)
        _side_bar(ax, theme)
    warn_of_missing(missing)
    return figure


def _side_bar(ax: "Axes", theme: Theme) -> None:
    figure = ax.get_figure(root=True)
    assert figure is not None
    across, place = figure.get_size_inches()[0], ax.get_position()
    bar = figure.add_axes((place.x1 + 0.12 / across, place.y0, 0.1 / across, place.height))
    shown = figure.colorbar(ax.get_images()[0], cax=bar)
    frame(bar, theme)
    bar.tick_params(labelsize=FONT_POINTS - 1)
    shown.outline.set_linewidth(0.5)


def plain(ax: "Axes", theme: Theme) -> None:
    frame(ax, theme)
    ax.set_facecolor(theme.paper)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def faulty_row(finding: Finding, *, theme: Theme = LIGHT) -> "Figure":
    """Draw the weights of the row that shows a fault: a bar for each key, and the faulty one in another colour.

    Args:
        finding: one of `seen.audit()` with an example.
        theme: `LIGHT` or `DARK`.

    Returns:
        A new figure; `save_figure(figure, path)` writes it.

    Raises:
        NotKeptError: the finding has no example.
        MissingExtraError: matplotlib is not installed.
    """
    require(finding, Finding, "finding", "a finding of seen.audit()")
    require_matplotlib()
    weights, example = finding.row.detach().float().cpu().numpy(), finding.example
    assert example is not None, "only a finding with one has a row"
    where = f"{finding.path or 'the model'}, sequence {example.sequence}, head {example.head}, query {example.query}"
    title = f"{finding.reason}: {where}"
    wide = max(PLOT[0] + 0.9, heading_inches(title) + 2 * MARGIN)
    top = MARGIN + 0.35
    figure, (ax,), missing = framed(Box(0, 0, wide, top + PLOT[1] + 0.5), [Box(0.7, top, *PLOT)], theme, title)
    plain(ax, theme)
    colours = [theme.accents[1] if key == example.key else theme.accents[0] for key in range(len(weights))]
    ax.bar(np.arange(len(weights)), weights, 0.8, color=colours, linewidth=0)
    ax.set_xlim(-0.5, len(weights) - 0.5)
    ax.set_xlabel("keys", fontsize=FONT_POINTS, color=theme.ink)
    ax.set_ylabel("weight", fontsize=FONT_POINTS, color=theme.ink)
    warn_of_missing(missing)
    return figure
