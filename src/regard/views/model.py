"""What a whole model looked at: every head of every layer in one picture, or on one page."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError, ShapeError
from regard.inspection.analysis.tables import Maps, named
from regard.maps.attention_map import AttentionMap
from regard.views.fonts import letter
from regard.views.heatmap import (
    colour_bar,
    foot,
    new_figure,
    our_colours,
    require_matplotlib,
    text_style,
    warn_of_missing,
    write_heading,
)
from regard.views.html.contents import Example, Map
from regard.views.labels import printable, width
from regard.views.layout import COLOUR_BAR, FONT_POINTS, GLYPH, LINE, MARGIN, Box

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

DotPooling = Literal["max", "mean"]
GAP = 6
"""Points of the picture between two heads."""
DOTS_PER_INCH = 150
SIDE = 6.0
"""Inches up to which the longer side of a small model's picture is enlarged, by whole dots."""


def model_grid(
    maps: Maps,
    *,
    sequence: int = 0,
    cells: int = 128,
    how: DotPooling = "max",
    limits: tuple[float, float] = (0.0, 1.0),
    power: float = 0.4,
    title: str = "",
    colour_map: "str | Colormap | None" = None,
) -> "Figure":
    """Draw every head of every layer: layers down, heads across, in each queries down and keys across.

    A map of any length becomes an exact picture of at most `cells` values on a side; T x S weights are never made.

    Args:
        maps: what `regard.watch` saw, or attention maps (batch..., H, T, S).
        sequence: which of the batch, counted through all its dimensions.
        cells: most values on a side of a head.
        how: a value is the largest of its weights, or their mean.
        limits: the weights at the two ends of the colours.
        power: colours follow weight ** power: below 1, small weights show; 1 is in proportion, as in `heatmap`.
        title: printed above.
        colour_map: a matplotlib colour map or its name; None for ours.

    Returns:
        A new figure; `.savefig(path)` writes it.

    Of maps of which statistics alone were kept (`regard.watch(model, keep="summary")`), the finest picture that was
    kept `how` is drawn.

    Raises:
        ArgumentError: no maps, or an argument out of its range.
        NotKeptError: no such picture was kept; the message says what was.
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
    if cells < 1 or power <= 0 or how not in ("max", "mean"):
        raise ArgumentError(
            f"cells must be at least 1, power above 0 and how 'max' or 'mean'; got {cells}, {power} and {how!r}"
        )
    found = named(maps)
    layers = [_panels(of_sequence(one, sequence), cells, how) for _, one in found]
    dots, pitch = _laid_out(layers)
    names = [printable(name, limit=40) for name, _ in found]
    return _drawn(dots, pitch, names, title, _note(found, cells, how), limits, power, colour_map)


def model_example(
    maps: Maps,
    tokens: Sequence[str] | None = None,
    source: Sequence[str] | None = None,
    *,
    sequence: int = 0,
    title: str = "attention",
) -> Example:
    """Every head of every layer as an example of a page: `save_page(path, [model_example(seen, tokens)])`.

    Args:
        maps: what `regard.watch` saw, or attention maps (batch..., H, T, S). The page holds weights: for short inputs.
        tokens: labels; they stand wherever there are as many queries or keys.
        source: labels of another sequence, such as an encoder's, likewise; where both have the length, queries
            take `tokens` and keys `tokens` too.
        sequence: which of the batch, counted through all its dimensions.
        title: of the example.

    Raises:
        ArgumentError: no maps.
        ShapeError: no such sequence, or labels that fit no map.

    >>> import torch, regard
    >>> q = torch.randn(1, 2, 3, 4)
    >>> maps = [regard.attention(q, q, q, return_weights=True).weights]
    >>> model_example(maps, ["le", "chat", "dort"]).maps["0"].rows
    ['le', 'chat', 'dort']
    """
    found = named(maps)
    given = [list(labels) for labels in (tokens, source) if labels is not None]
    lengths = {n for _, one in found for n in one.shape[-2:]}
    for labels in given:
        if len(labels) not in lengths:
            raise ShapeError(f"{len(labels)} labels came for maps of {', '.join(map(str, sorted(lengths)))} tokens")

    def fitting(count: int) -> list[str] | None:
        return next((labels for labels in given if len(labels) == count), None)

    made = {name: Map(of_sequence(one, sequence), *map(fitting, one.shape[-2:])) for name, one in found}
    return Example(title, made)


def of_sequence(weights: AttentionMap, sequence: int) -> AttentionMap:
    """The map (H, T, S) of one sequence of the batch.

    Raises:
        ShapeError: no such sequence.
    """
    batch = weights.leading[:-1]
    count = int(np.prod(batch))
    if not 0 <= sequence < count:
        raise ShapeError(f"sequence must be in [0, {count}), got {sequence}: the map is {tuple(weights.shape)}")
    chosen = weights[tuple(int(i) for i in np.unravel_index(sequence, batch))] if batch else weights
    assert isinstance(chosen, AttentionMap)
    return chosen


def _panels(weights: AttentionMap, cells: int, how: DotPooling) -> npt.NDArray[np.floating[Any]]:
    """The heads as pictures (H, rows, columns); a short one has each value several times."""
    grid = weights.grid(cells, cells, how)
    drawn = weights.detach().pooled(grid.rows.count, grid.columns.count, how).cpu().numpy()
    times = max(1, cells // max(drawn.shape[-2:]))
    return drawn.repeat(times, -2).repeat(times, -1)


def _laid_out(layers: list[npt.NDArray[np.floating[Any]]]) -> tuple[npt.NDArray[np.floating[Any]], tuple[int, int]]:
    """All pictures in one array, NaN between them, and the dots from one to the next."""
    pitch = (max(one.shape[1] for one in layers) + GAP, max(one.shape[2] for one in layers) + GAP)
    dots = np.full((len(layers) * pitch[0] - GAP, max(len(one) for one in layers) * pitch[1] - GAP), np.nan)
    for row, heads in enumerate(layers):
        for column, head in enumerate(heads):
            top, left = row * pitch[0], column * pitch[1]
            dots[top : top + head.shape[0], left : left + head.shape[1]] = head
    return dots, pitch


def _note(found: list[tuple[str, AttentionMap]], cells: int, how: DotPooling) -> str:
    """What a value stands for, where it is not one weight."""
    grids = [one.grid(cells, cells, how) for _, one in found]
    down = max(grid.rows.length / grid.rows.count for grid in grids)
    across = max(grid.columns.length / grid.columns.count for grid in grids)
    return "" if down == across == 1 else f"{how} of {_size(down)} × {_size(across)} weights a dot"


def _size(mean: float) -> str:
    """The mean size of blocks; the digits say that it is not 1, where it is not."""
    return f"{mean:.3g}" if mean == 1 or mean >= 1.005 else f"{mean:.6g}"


def _drawn(
    dots: npt.NDArray[np.floating[Any]],
    pitch: tuple[int, int],
    names: list[str],
    title: str,
    note: str,
    limits: tuple[float, float],
    power: float,
    colour_map: "str | Colormap | None",
) -> "Figure":
    from matplotlib.colors import PowerNorm

    # Whole dots a value, so that none is drawn wider than another.
    zoom = max(1, int(SIDE * DOTS_PER_INCH) // max(dots.shape))
    across, down = (zoom * n / DOTS_PER_INCH for n in dots.shape[::-1])
    left = MARGIN + GLYPH * max(5, *(width(name) for name in names)) + 0.1
    heading = " ".join(part for part in (title, f"({note})" if note else "") if part)
    above = MARGIN + LINE * (1.2 + 1.7 * bool(heading))
    wide = max(left + across, MARGIN + GLYPH * 1.4 * width(heading), 3.0) + MARGIN
    outline = Box(0, 0, wide, above + down + COLOUR_BAR + 2 * MARGIN)
    figure, (ax,) = new_figure(outline, [Box(left, above, across, down)])
    missing = write_heading(figure, heading) if heading else ""
    image = ax.imshow(
        dots, norm=PowerNorm(power, *limits), cmap=our_colours() if colour_map is None else colour_map,
        interpolation="nearest", aspect="auto",
    )  # fmt: skip
    heads = (dots.shape[1] + GAP) // pitch[1]
    ax.set_facecolor("0.8")
    ax.xaxis.tick_top()
    ax.tick_params(length=0, pad=2)
    for spine in ax.spines.values():
        spine.set_visible(False)
    heads_named = [f"head {h}" if zoom * pitch[1] >= 9 * GLYPH * DOTS_PER_INCH else str(h) for h in range(heads)]
    ax.set_xticks([pitch[1] * h + (pitch[1] - GAP) / 2 for h in range(heads)], heads_named)
    lettered = letter(names)
    ax.set_yticks(
        [pitch[0] * n + (pitch[0] - GAP) / 2 for n in range(len(names))], [one.text for one in lettered],
        parse_math=False,
    )  # fmt: skip
    for label, lettering in zip(ax.get_yticklabels(), lettered, strict=True):
        label.set(fontsize=FONT_POINTS, **text_style(lettering))
        missing += lettering.missing
    for label in ax.get_xticklabels():
        label.set(fontsize=FONT_POINTS)
    # Softmax rounds to a little over 1 at times.
    colour_bar(image, float(np.nanmin(dots)), float(np.nanmax(dots)) - 1e-5, limits, cax=foot(figure))
    warn_of_missing(missing)
    return figure
