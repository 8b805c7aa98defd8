"""The attention of a whole model: every head of every layer in one picture, or on one page."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from regard.errors import ArgumentError
from regard.maps.attention_map import AttentionMap
from regard.tensors.kinds import refuse_wrong_kinds
from regard.views.axis_text import FONT_POINTS, LINE, AxisLabel, measured, short_title, widest
from regard.views.colours import LIGHT, Theme
from regard.views.drawing import Colouring
from regard.views.examples import of_sequence
from regard.views.figures import (
    colours_of,
    foot,
    framed,
    heading_inches,
    norm_of,
    require_matplotlib,
    text_style,
    warn_of_missing,
)
from regard.views.layout import COLOUR_BAR, MARGIN, NARROWEST, Box
from regard.views.masked import Cells, hidden_cells
from regard.views.scales import ColourScale, Numbers, ScaleName
from regard.views.values import require_finite
from regard.watching.analysis.tables import Maps, named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DotPooling = Literal["max", "mean"]
GAP = 6
"""Points of the picture between two heads."""
DOTS_PER_INCH = 150
SIDE = 6.0
"""The longer side of a small model's picture in inches, after enlarging by whole dots."""


@refuse_wrong_kinds
def model_grid(
    maps: Maps,
    *,
    sequence: int = 0,
    cells: int = 128,
    how: DotPooling = "max",
    scale: ScaleName | ColourScale = "sqrt",
    limits: tuple[float, float] | None = None,
    without_sink: bool = False,
    title: str = "",
    theme: Theme = LIGHT,
) -> "Figure":
    """Draw every head of every layer: layers down, heads across, in each queries down and keys across.

    A map of any length becomes an exact picture of at most `cells` values on a side; T x S weights are never made.

    Args:
        maps: the recording of `regard.watch`, a model with its inputs, or maps or tensors (batch..., H, T, S).
        sequence: the sequence of the batch, counted through all its dimensions.
        cells: most values on a side of a head.
        how: a value is the largest of its weights, or their mean.
        scale: the colour of a weight, as in `heatmap`.
        limits: the weights at the two ends of the colours, for all heads; None for those of the data.
        without_sink: leave the first key out of the limits.
        title: printed above.
        theme: `LIGHT` or `DARK` of `regard.views`, or your own.

    Returns:
        A new figure; `save_figure(figure, path)` writes it.

    Maps with statistics only (`regard.watch(model, keep="summary")`) are drawn by the finest recorded picture of `how`.

    Raises:
        ArgumentError: no maps, or an argument out of its range.
        NotKeptError: no such picture was recorded; the message lists the others.
        ShapeError: no such sequence.
        MissingExtraError: matplotlib is not installed.

    >>> import torch, regard
    >>> q = torch.randn(1, 4, 300, 8)
    >>> maps = [regard.attention(q * n, q, q, mask=regard.causal(), return_weights=True).weights for n in (1, 2, 3)]
    >>> figure = model_grid(maps, title="three layers")
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['0', '1', '2']
    """
    require_matplotlib()
    if cells < 1 or how not in ("max", "mean"):
        raise ArgumentError(f"cells must be at least 1 and how 'max' or 'mean'; got {cells} and {how!r}")
    look = Colouring.chosen(scale, limits, without_sink, theme)
    found = named(maps)
    heads = max(one.shape[-3] if len(one.shape) > 2 else 1 for _, one in found)
    room = max(cells, int(SIDE * DOTS_PER_INCH) // max(heads, len(found)) - GAP)
    layers = [_layer(of_sequence(one, sequence), cells, how, look, room) for _, one in found]
    heading = " ".join(part for part in (short_title(title), _note(found, cells, how)) if part)
    return _drawn(layers, [name for name, _ in found], heading, look)


class LayerPicture(NamedTuple):
    """The heads of one layer as pictures (H, rows, columns), each value several times if there are few."""

    values: Numbers
    hidden: Cells
    counted: Cells


def _layer(weights: AttentionMap, cells: int, how: DotPooling, look: Colouring, room: int) -> LayerPicture:
    grid = weights.grid(cells, cells, how)
    pooled = weights.detach().pooled(grid.rows.count, grid.columns.count, how).cpu().numpy()
    require_finite(pooled, grid)
    hidden = np.stack([hidden_cells(weights[head], grid) for head in range(len(pooled))])
    counted = ~hidden
    if look.without_sink and counted[..., 1:].any():
        counted[..., 0] = False
    times = max(1, room // max(pooled.shape[-2:]))
    values = look.scale.prepared(pooled, counted)
    return LayerPicture(
        values.repeat(times, -2).repeat(times, -1),
        hidden.repeat(times, -2).repeat(times, -1),
        counted.repeat(times, -2).repeat(times, -1),
    )


def _note(found: list[tuple[str, AttentionMap]], cells: int, how: DotPooling) -> str:
    grids = [one.grid(cells, cells, how) for _, one in found]
    down = max(grid.rows.length / grid.rows.count for grid in grids)
    across = max(grid.columns.length / grid.columns.count for grid in grids)
    return "" if down == across == 1 else f"({how} of {_size(down)} × {_size(across)} weights a dot)"


def _size(mean: float) -> str:
    return f"{mean:.3g}" if mean == 1 or mean >= 1.005 else f"{mean:.6g}"


def _drawn(layers: list[LayerPicture], names: list[str], heading: str, look: Colouring) -> "Figure":
    dots, pitch = _laid_out([layer.values for layer in layers])
    outside, _ = _laid_out([layer.hidden.astype(float) for layer in layers])
    counted = np.concatenate([layer.values[layer.counted] for layer in layers])
    limits = look.limits or look.scale.limits(counted)
    # Whole dots per value, so that all are equally wide.
    zoom = max(1, int(SIDE * DOTS_PER_INCH) // max(dots.shape))
    across, down = (zoom * n / DOTS_PER_INCH for n in dots.shape[::-1])
    labels = measured(short_names(names), space=" ")
    left = MARGIN + max(0.4, widest(labels)) + 0.1
    above = MARGIN + LINE * (1.2 + 1.7 * bool(heading))
    wide = max(left + across, MARGIN + heading_inches(heading), NARROWEST) + MARGIN
    outline = Box(0, 0, wide, above + down + COLOUR_BAR + 2 * MARGIN)
    figure, (ax,), missing = framed(outline, [Box(left, above, across, down)], look.theme, heading)
    image = ax.imshow(
        np.ma.array(dots, mask=outside != 0), norm=norm_of(look.scale, limits), interpolation="nearest",
        cmap=colours_of(look, limits), aspect="auto",
    )  # fmt: skip
    _back(ax, layers, pitch, look.theme)
    missing += _name(ax, pitch, dots.shape[1], zoom, labels, look.theme)
    shown = dots[outside == 0] if (outside == 0).any() else np.zeros(1)  # no query has a key
    span, has_masked = (float(shown.min()), float(shown.max())), any(layer.hidden.any() for layer in layers)
    foot(figure, image, span, limits, look, look.note(titled=False), has_masked=has_masked)
    warn_of_missing(missing)
    return figure


def _laid_out(layers: Sequence[Numbers]) -> tuple[Numbers, tuple[int, int]]:
    pitch = (max(one.shape[1] for one in layers) + GAP, max(one.shape[2] for one in layers) + GAP)
    dots = np.full((len(layers) * pitch[0] - GAP, max(len(one) for one in layers) * pitch[1] - GAP), np.nan)
    for row, heads in enumerate(layers):
        for column, head in enumerate(heads):
            top, left = row * pitch[0], column * pitch[1]
            dots[top : top + head.shape[0], left : left + head.shape[1]] = head
    return dots, pitch


def _back(ax: "Axes", layers: Sequence[LayerPicture], pitch: tuple[int, int], theme: Theme) -> None:
    from matplotlib.patches import Rectangle

    ax.set_facecolor(theme.gap)
    for row, layer in enumerate(layers):
        heads, down, across = layer.values.shape
        for head in range(heads):
            corner = (head * pitch[1] - 0.5, row * pitch[0] - 0.5)
            ax.add_patch(Rectangle(corner, across, down, facecolor=theme.masked, linewidth=0, zorder=-1))


def _name(ax: "Axes", pitch: tuple[int, int], across: int, zoom: int, labels: Sequence[AxisLabel], theme: Theme) -> str:
    heads = (across + GAP) // pitch[1]
    ax.xaxis.tick_top()
    ax.tick_params(length=0, pad=2, labelsize=FONT_POINTS, labelcolor=theme.ink)
    for spine in ax.spines.values():
        spine.set_visible(False)
    room = zoom * pitch[1] / DOTS_PER_INCH
    long = widest(measured([f"head {heads - 1}"])) + 0.05 <= room
    step = 1 if long else -(-int(1000 * (widest(measured([str(heads - 1)])) + 0.05)) // max(1, int(1000 * room)))
    ax.set_xticks(
        [pitch[1] * h + (pitch[1] - GAP) / 2 for h in range(0, heads, step)],
        [f"head {h}" if long else str(h) for h in range(0, heads, step)],
    )
    ax.set_yticks(
        [pitch[0] * n + (pitch[0] - GAP) / 2 for n in range(len(labels))],
        [label.lettering.text for label in labels], parse_math=False,
    )  # fmt: skip
    for text, label in zip(ax.get_yticklabels(), labels, strict=True):
        text.set(fontsize=FONT_POINTS, **text_style(label.lettering, theme))
    return "".join(label.lettering.missing for label in labels)


def short_names(paths: Sequence[str]) -> list[str]:
    """The parts of each path that differ from the others; one number alone is "layer" with that number.

    >>> short_names(["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"])
    ['layer 0', 'layer 1']
    >>> short_names(["encoder.0.self_attention", "decoder.0.self_attention", "decoder.0.cross_attention"])
    ['encoder.0.self_attention', 'decoder.0.self_attention', 'decoder.0.cross_attention']
    >>> short_names(["model.layers.3.attn"])
    ['layer 3']
    """
    parts = [path.split(".") for path in paths]
    if len(set(paths)) == 1:
        numbers = [part for part in parts[0] if part.isdigit()]
        return [f"layer {numbers[0]}" if len(numbers) == 1 else paths[0]] * len(paths)
    shortest = min(map(len, parts))
    start = next((n for n in range(shortest) if len({one[n] for one in parts}) > 1), shortest)
    end = next((n for n in range(shortest - start) if len({one[-1 - n] for one in parts}) > 1), shortest - start)
    short = [one[start : len(one) - end] for one in parts]
    if shortest > 1 and all(len(one) == 1 and one[0].isdigit() for one in short):
        return [f"layer {one[0]}" for one in short]
    return [".".join(one) or path for one, path in zip(short, paths, strict=True)]
