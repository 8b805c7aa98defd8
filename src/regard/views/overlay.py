"""The attention of a part of an image model, laid over the image."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regard.errors import ArgumentError, NonFiniteError, ShapeError, require, require_whole
from regard.lazy import displayed
from regard.maps.attention_map import AttentionMap
from regard.tensors.kinds import refuse_wrong_kinds
from regard.views import figures
from regard.views.axis_text import LINE, TITLE_POINTS, short_title
from regard.views.colours import LIGHT, Theme
from regard.views.drawing import Colouring
from regard.views.figures import (
    colours_of,
    foot,
    framed,
    heading_inches,
    norm_of,
    require_axes,
    require_matplotlib,
    warn_of_missing,
    write_title,
)
from regard.views.fonts import letter
from regard.views.layout import COLOUR_BAR, MARGIN, NARROWEST, Box, FigureSize, flow
from regard.views.scales import ColourScale, Limits, Numbers, ScaleName
from regard.watching.report import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIDE, SIDE_IN_GRID = 5.0, 2.2
"""The longer side of the image in inches, alone and in a grid."""
NOTE = 1.6
"""Inches of the words about other tokens in the title of a panel."""
MOST_EXTRA = 64
"""The most tokens before the patches taken for class and register tokens."""


class Upsampling(NamedTuple):
    """How the colours of patches are spread over the pixels of the image: `WHOLE_PATCHES`, `SMOOTH`, or your own."""

    name: str
    """A name of matplotlib's interpolations."""


WHOLE_PATCHES = Upsampling("nearest")
"""Every pixel of a patch has the colour of its weight: each colour in the picture is a weight of the map."""
SMOOTH = Upsampling("bilinear")
"""Colours run from the centre of each patch to those of its neighbours. At the centres they are those of the weights;
between them they are interpolated, and no weight of the map."""


@displayed
class PatchGrid(NamedTuple):
    """The position of an image's patches among the tokens of a model."""

    rows: int
    columns: int
    extra: int
    """Tokens before the first patch: the class token, then registers."""

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.extra + self.rows * self.columns


def patch_grid(count: int, image: tuple[int, int], *, extra: int | None = None, patch: int | None = None) -> PatchGrid:
    """Find the patches among the tokens of an image model.

    Patches are squares in row-major order after the class token and the registers. Without `extra` and `patch`, the
    largest patches in the proportions of the image with one to 64 other tokens are taken; models without other tokens
    come first, if their patch count fits exactly.

    Args:
        count: the tokens of the model.
        image: the height and the width of the image in pixels, as the model saw it.
        extra: the tokens before the patches: 1 for ViT and DINOv2, 5 for DINOv2 with four registers, 0 for models that
            pool their patches. None infers it.
        patch: the side of a patch in pixels; None infers it.

    Raises:
        ShapeError: no grid of patches of the image gives so many tokens.
        ArgumentError: a number is out of its range.

    >>> patch_grid(29, (56, 84), extra=5), patch_grid(197, (224, 224)), patch_grid(29, (56, 84), patch=14)
    (PatchGrid(rows=4, columns=6, extra=5), PatchGrid(rows=14, columns=14, extra=1),
     PatchGrid(rows=4, columns=6, extra=5))
    """
    try:
        height, width = image
        require_whole(count=count, height=height, width=width)
    except (TypeError, ValueError) as error:
        given = f"{count!r:.80} and {image!r:.80}"
        raise ArgumentError(f"count and image must be a number and two numbers, got {given}") from error
    if min(count, height, width) < 1 or (extra is not None and extra < 0) or (patch is not None and patch < 1):
        raise ArgumentError(
            f"count, image and patch must be at least 1, extra at least 0; got {count}, {image}, {patch} and {extra}"
        )
    sizes = [patch] if patch is not None else list(range(1, min(height, width) + 1))
    grids = [PatchGrid(height // size, width // size, count - (height // size) * (width // size)) for size in sizes]
    fitting = [
        grid for size, grid in zip(sizes, grids, strict=True)
        if min(grid.rows, grid.columns) > 0
        and (grid.extra == extra if extra is not None else 0 <= grid.extra <= MOST_EXTRA)
        and (patch is not None or (height % size == 0 and width % size == 0))
    ]  # fmt: skip
    if not fitting:
        told = f"{'any number of' if extra is None else extra} other tokens"
        raise ShapeError(
            f"{count} tokens are no patches of an image of {height} x {width} pixels"
            f"{'' if patch is None else f' in squares of {patch}'} and {told}: pass extra= (class token and registers) "
            "and patch= (pixels), and the size of the image that the model saw"
        )
    # Most patches, and so the fewest other tokens: a coarser grid with more registers is a rarer model.
    return min(fitting, key=lambda grid: grid.extra)


@refuse_wrong_kinds
def overlay(
    image: Any,
    weights: Any,
    *,
    token: int | str = "class",
    extra: int | None = None,
    patch: int | None = None,
    ax: "Axes | None" = None,
    title: str = "",
    scale: ScaleName | ColourScale = "sqrt",
    limits: tuple[float, float] | None = None,
    strength: float = 0.6,
    upsampling: Upsampling = WHOLE_PATCHES,
    colour_bar: bool = True,
    theme: Theme = LIGHT,
) -> "Axes":
    """Draw an image and, over it, the attention of one token of an image model to each of its patches.

    The image is grey, under each patch's colour. The title names the query of a whole map, and gives the weight of the
    class token and the registers, which have no position in the image. The colours begin at the smallest weight of a
    patch, so that a diffuse map does not tint the whole image; the bar has this number.

    Args:
        image: (height, width, 3) or (3, height, width), floats in 0..1 or integers in 0..255; or (height, width) in
            grey, in the proportions of the model's input.
        weights: the map (T, T) of one head, an `AttentionMap`, a tensor or an array; the mean over heads is
            `seen[layer, 0][0].average()`. Or the weights of one query, (T,), such as a row of `rollout`.
        token: the query: "class" for the first token, "mean" for the mean over all patches, or the index of a patch in
            row-major order.
        extra: the tokens before the patches (`patch_grid` infers it where it can).
        patch: the side of a patch in pixels of `image`.
        ax: the axes to draw into; None makes a new figure.
        title: printed above.
        scale: the colour of a weight, as in `heatmap`; limits come from the patches alone.
        limits: as in `heatmap`.
        strength: the opacity of the colours, in 0..1.
        upsampling: how patches become pixels: `WHOLE_PATCHES`, or `SMOOTH`, where only the centres are exact.
        colour_bar: whether to draw a bar of colours with its values.
        theme: the colours of the paper and the text.

    Returns:
        The axes; their last image holds the weights of the patches, (rows, columns).

    Raises:
        ShapeError: the image has another shape, the weights are not one map, or patches and tokens do not fit.
        ArgumentError: `token` or another argument is out of its range.
        NonFiniteError: a weight or a pixel is NaN or infinite.
        MissingExtraError: matplotlib is not installed.

    >>> import torch
    >>> axes = overlay(torch.rand(3, 28, 42), torch.full((7, 7), 1 / 7), extra=1)
    >>> axes.get_images()[-1].get_array().shape
    (2, 3)
    """
    require_axes(ax)
    if not 0 <= strength <= 1:
        raise ArgumentError(f"strength must be in 0..1; got {strength}")
    look = Colouring.chosen(scale, limits, False, theme)
    pixels = _pixels(image)
    shape = tuple(getattr(weights, "shape", ()))
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] != shape[1]) or 0 in shape:
        raise ShapeError(
            f"weights must be one map (T, T) or one row (T,) of it; got {shape}: name the batch and the head"
        )
    grid = patch_grid(shape[-1], pixels.shape[:2], extra=extra, patch=patch)
    row = _row(weights, token, grid)
    patches, others = row[grid.extra :].reshape(grid.rows, grid.columns), float(row[: grid.extra].sum())
    note = f"{others:.0%} on {count(grid.extra, 'other token')}" if grid.extra else ""
    query = _query(token) if len(shape) == 2 else ""
    heading = " · ".join(part for part in (short_title(title), query, note) if part)
    values = look.scale.prepared(patches, np.ones_like(patches, bool))
    limits = _limits(values, look)
    figure = None
    if ax is None:
        inches = SIDE / max(pixels.shape[:2])
        down, across = inches * pixels.shape[0], inches * pixels.shape[1]
        (lettering,) = letter([heading])
        above = MARGIN + LINE * 1.6 * bool(heading)
        wide = max(across, lettering.inches(TITLE_POINTS), NARROWEST) + 2 * MARGIN
        outline = Box(0, 0, wide, above + down + MARGIN + COLOUR_BAR * colour_bar)
        figure, (ax,), _ = framed(outline, [Box(MARGIN, above, across, down)], look.theme)
    where: Any = {
        "extent": (-0.5, grid.columns - 0.5, grid.rows - 0.5, -0.5), "aspect": "auto" if figure else None,
    }  # fmt: skip
    ax.imshow(pixels.mean(-1, keepdims=True).repeat(3, -1), interpolation="antialiased", **where)
    shown = ax.imshow(
        values, norm=norm_of(look.scale, limits), cmap=colours_of(look, limits), interpolation=upsampling.name,
        interpolation_stage="data", alpha=strength, **where,
    )  # fmt: skip
    ax.set_axis_off()
    span = float(values.min()), float(values.max())
    if colour_bar and figure is not None:
        foot(figure, shown, span, limits, look)
    elif colour_bar:
        figures.colour_bar(shown, span, limits, look, ax=ax)
    warn_of_missing(write_title(ax, heading, theme))
    return ax


@refuse_wrong_kinds
def overlay_grid(
    image: Any,
    panels: Sequence[tuple[str, Any]],
    *,
    token: int | str | None = None,
    title: str = "",
    scale: ScaleName | ColourScale = "sqrt",
    limits: tuple[float, float] | None = None,
    theme: Theme = LIGHT,
) -> "Figure":
    """Draw an image several times, and over it the attention of one head each, under one colour bar.

    Args:
        image: as in `overlay`; or a list of images of one size, one a panel, as the frames of a video.
        panels: titles, and the weights of heads: maps (T, T), or rows (T,).
        token: the query of maps, as in `overlay`; None is the class token, or without one the mean over all patches.
            The bar names it.
        title: printed above the grid.
        scale: as in `heatmap`.
        limits: as in `heatmap`, one pair for all panels.
        theme: as in `heatmap`.

    Returns:
        A new figure; `save_figure(figure, path)` writes it.

    Raises:
        RegardError: as in `overlay`.
        ArgumentError: there are no panels, or there is not one image a panel.

    >>> import torch
    >>> figure = overlay_grid(torch.rand(3, 28, 42), [("head 0", torch.full((7, 7), 1 / 7))], title="a cat")
    >>> figure.axes[0].get_title(loc="left")
    'head 0 · 14% on 1 other token'
    """
    require_matplotlib()
    require(panels, Sequence, "panels", "a list of titles with weights")
    if not panels or not all(isinstance(one, tuple) and len(one) == 2 for one in panels):
        raise ArgumentError(f"panels must be one or more pairs of a title and weights; got {panels!r:.80}")
    frames = _frames(image, len(panels))
    pixels = frames[0]
    grids = [patch_grid(weights.shape[-1], pixels.shape[:2]) for _, weights in panels]
    query = ("class" if grids[0].extra else "mean") if token is None else token
    rows = [_row(one, query, grid) for (_, one), grid in zip(panels, grids, strict=True)]
    look = Colouring.chosen(scale, limits, False, theme)
    values = [look.scale.prepared(row[grid.extra :], np.ones(grid.rows * grid.columns, bool))
              for row, grid in zip(rows, grids, strict=True)]  # fmt: skip
    limits = _limits(np.concatenate(values), look)
    inches = SIDE_IN_GRID / max(pixels.shape[:2])
    height, width = inches * pixels.shape[0], inches * pixels.shape[1]
    title = short_title(title)
    widest_title = max(one.inches(TITLE_POINTS) for one in letter([name for name, _ in panels]))
    sizes = [FigureSize(width, height, 0.0, LINE * 1.6, widest_title + NOTE)] * len(panels)
    figure, axes, missing = framed(*flow(sizes, title=heading_inches(title)), theme, title)
    for ax, frame, row, (name, _) in zip(axes, frames, rows, panels, strict=True):
        overlay(frame, row, ax=ax, title=name, scale=scale, limits=limits, colour_bar=False, theme=theme)
    span = min(float(one.min()) for one in values), max(float(one.max()) for one in values)
    whose = f"; of the {_query(query)}" if all(one.ndim == 2 for _, one in panels) else ""
    foot(figure, axes[-1].get_images()[-1], span, limits, look, whose)
    warn_of_missing(missing)
    return figure


def _limits(values: Numbers, look: Colouring) -> Limits:
    found, floor = look.limits or look.scale.limits(values), float(values.min())
    return found._replace(low=floor) if look.limits is None and found.low < floor < found.high else found


def _query(token: int | str) -> str:
    return {"class": "class token", "mean": "mean over patches"}.get(str(token), f"patch {token}")


def _row(weights: Any, token: int | str, grid: PatchGrid) -> npt.NDArray[np.float64]:
    if weights.ndim == 1:
        row = weights
    elif token == "class":
        if not grid.extra:
            raise ArgumentError("this model has no class token: pass token='mean' or the number of a patch")
        row = weights[0]
    elif token == "mean":
        if isinstance(weights, AttentionMap):
            row = weights.only(rows=slice(grid.extra, None)).received() / (grid.tokens - grid.extra)
        else:
            row = weights[grid.extra :].mean(0)
    elif isinstance(token, int) and 0 <= token < grid.tokens - grid.extra:
        row = weights[grid.extra + token]
    else:
        raise ArgumentError(
            f"token must be 'class', 'mean' or a patch in 0..{grid.tokens - grid.extra - 1}; got {token!r}"
        )
    numbers = row.detach().double().cpu().numpy() if isinstance(row, Tensor) else np.asarray(row, np.float64)
    if not np.isfinite(numbers).all():
        raise NonFiniteError(f"weights must be finite; {numbers[~np.isfinite(numbers)][0]} came")
    return numbers


def _frames(image: Any, panels: int) -> list[Numbers]:
    if not (isinstance(image, list | tuple) and all(hasattr(one, "shape") for one in image)):
        return [_pixels(image)] * panels
    frames = [_pixels(one) for one in image]
    if len(frames) != panels or len({one.shape for one in frames}) > 1:
        raise ArgumentError(
            f"image must be one image, or one of the same size for each of the {panels} panels; got {len(frames)} "
            f"images (height, width, 3) of {', '.join(sorted({str(one.shape) for one in frames})) or 'no size'}"
        )
    return frames


def _pixels(image: Any) -> Numbers:
    array = image.detach().cpu().numpy() if isinstance(image, torch.Tensor) else np.asarray(image)
    if array.dtype.kind not in "fiu" or array.ndim not in (2, 3) or 0 in array.shape:
        raise ShapeError(
            f"image must be numbers (height, width, 3), (3, height, width) or (height, width); "
            f"got {array.dtype} {array.shape}"
        )
    if array.ndim == 2:
        array = array[..., None].repeat(3, -1)
    elif array.shape[-1] != 3 and array.shape[0] == 3:
        array = array.transpose(1, 2, 0)
    if array.shape[-1] != 3:
        raise ShapeError(f"image must have three colours; got {array.shape}")
    pixels: Numbers = array / 255.0 if array.dtype.kind in "iu" else array.astype(float)
    if not np.isfinite(pixels).all():
        raise NonFiniteError("the image must be finite; NaN or infinity came")
    if pixels.min() < -1e-6 or pixels.max() > 1 + 1e-6:
        raise ArgumentError(
            f"a float image must lie in 0..1; got {pixels.min():.3g} to {pixels.max():.3g}: undo its normalization"
        )
    return pixels.clip(0, 1)
