"""Figures of matplotlib in the style of regard: paper, headings, colour bars, ticks and the norm of a scale.

Figures are made without pyplot: nothing here selects a backend, keeps a figure alive or changes an rcParam. So the
views work in a script without a screen, in a notebook, and in a figure of your own.
"""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import ArgumentError, needs, require
from regard.files.atomic import file_errors, replacing
from regard.views.axis_text import FONT_POINTS, TITLE_POINTS
from regard.views.colours import Theme
from regard.views.drawing import Colouring
from regard.views.fonts import Lettering, letter
from regard.views.layout import COLOUR_BAR, MARGIN, Box
from regard.views.scales import ColourScale, Limits, numeral

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

HEADING_POINTS = TITLE_POINTS + 2
MOST_DIGITS = 20
"""The most characters under a colour bar: five tick labels."""


def require_matplotlib() -> None:
    with needs("matplotlib", extra="view"):
        import matplotlib.figure  # noqa: F401


def require_axes(ax: object) -> None:
    require_matplotlib()
    if ax is not None and not hasattr(ax, "imshow"):
        raise ArgumentError(f"ax must be axes of matplotlib, such as figure.add_subplot(); got {type(ax).__name__}")


def framed(outline: Box, boxes: Sequence[Box], theme: Theme, title: str = "") -> "tuple[Figure, list[Axes], str]":
    from regard.views.artists import ShownAxes, ShownFigure

    figure = ShownFigure(figsize=(outline.width, outline.height), dpi=150, facecolor=theme.paper)
    # matplotlib's stubs do not know `axes_class` beside a rectangle.
    axes: Any = [figure.add_axes(fractions(outline, box), axes_class=ShownAxes) for box in boxes]
    (lettering,) = letter([title])
    place = (MARGIN / outline.width, 1 - MARGIN / outline.height)
    style: Any = {"fontsize": HEADING_POINTS, **text_style(lettering, theme)}
    if title:
        figure.text(*place, lettering.text, va="top", parse_math=False, **style)
    return figure, axes, lettering.missing


def sized_figure(size: tuple[float, float], theme: Theme) -> "tuple[Figure, Axes]":
    from regard.views.artists import ShownAxes, ShownFigure

    try:
        width, height = (float(side) for side in size)
    except (TypeError, ValueError):
        raise ArgumentError(f"figsize must be two numbers of inches, width and height; got {size!r}") from None
    if not (0 < width < np.inf and 0 < height < np.inf):
        raise ArgumentError(f"figsize must be two numbers of inches above 0; got {size!r}")
    figure = ShownFigure(figsize=(width, height), dpi=150, facecolor=theme.paper, layout="constrained")
    axes: Any = figure.add_subplot(axes_class=ShownAxes)
    return figure, axes


def fractions(outline: Box, box: Box) -> tuple[float, float, float, float]:
    bottom = outline.height - box.top - box.height
    return (
        box.left / outline.width,
        bottom / outline.height,
        box.width / outline.width,
        box.height / outline.height,
    )


def save_figure(figure: "Figure | Axes", path: str | os.PathLike[str]) -> Path:
    """Write a figure, or the figure of axes, atomically, in the format of the path's ending.

    Returns:
        The path.

    Raises:
        FileError: the file cannot be written; an older one stays as it was.
        ArgumentError: matplotlib has no format of that ending, or the axes were removed.
    """
    from matplotlib.artist import Artist

    require(figure, Artist, "figure", "a figure or axes of matplotlib")
    require(path, (str, os.PathLike), "path", "a path")
    target, whole = Path(path), figure.get_figure(root=True)
    if whole is None:
        raise ArgumentError("these axes were removed from their figure: draw the heatmap again")
    kind, known = target.suffix[1:].lower() or "png", sorted(whole.canvas.get_supported_filetypes())
    if kind not in known:
        raise ArgumentError(f"a figure is saved as {', '.join(known)}; got {os.fspath(path)!r}, which ends in .{kind}")
    with file_errors(target), replacing(target) as file:
        whole.savefig(file, format=kind)
    return target


def heading_inches(title: str) -> float:
    return letter([title])[0].inches(HEADING_POINTS) if title else 0.0


def write_title(ax: "Axes", title: str, theme: Theme) -> str:
    (lettering,) = letter([title])
    style = text_style(lettering, theme)
    ax.set_title(lettering.text, loc="left", fontsize=TITLE_POINTS, parse_math=False, **style)
    return lettering.missing


def text_style(lettering: Lettering, theme: Theme) -> dict[str, Any]:
    effects: list[Any] = []
    if any(face.thin for face in lettering.faces):
        from regard.views.artists import ThinStroke

        effects = [ThinStroke(lettering)]
    return {"fontfamily": list(lettering.families), "color": theme.ink, "path_effects": effects}


def frame(ax: "Axes", theme: Theme) -> None:
    ax.tick_params(length=2, width=0.5, pad=2, color=theme.line, labelcolor=theme.ink, labelsize=FONT_POINTS)
    for spine in ax.spines.values():
        spine.set(linewidth=0.5, color=theme.line)


def colours_of(look: Colouring, limits: Limits) -> "Colormap":
    from matplotlib.colors import ListedColormap

    colours = look.theme.signed_colours() if limits.low < 0 else look.theme.colours()
    return ListedColormap(colours, name="regard").with_extremes(bad=(0, 0, 0, 0))


def norm_of(scale: ColourScale, limits: Limits) -> "Normalize":
    from matplotlib.colors import Normalize

    class Norm(Normalize):
        def __call__(self, value: Any, clip: bool | None = None) -> Any:
            numbers: Any = np.ma.asarray(value, float)
            return np.ma.array(scale.shares(numbers.filled(limits.low), limits), mask=np.ma.getmask(numbers))

        def inverse(self, value: Any) -> Any:
            return scale.values(value, limits)

    return Norm(*limits)


def foot(
    figure: "Figure", image: Any, span: tuple[float, float], limits: Limits, look: Colouring, beside: str = "", *,
    has_masked: bool = False,
) -> None:  # fmt: skip
    from matplotlib.patches import Rectangle

    across, height = figure.get_size_inches()
    whole, theme = Box(0, 0, across, height), look.theme
    flat = figure.add_axes(fractions(whole, Box(2 * MARGIN, height - COLOUR_BAR - 0.02, 1.9, 0.09)))
    colour_bar(image, span, limits, look, beside, cax=flat)
    if has_masked:
        left, bottom, width, tall = fractions(whole, Box(2.5, height - COLOUR_BAR - 0.04, 0.15, 0.13))
        patch = Rectangle((left, bottom), width, tall, transform=figure.transFigure, linewidth=0)
        patch.set(facecolor=theme.masked, edgecolor=theme.hatch, hatch="//////")
        patch.set_hatch_linewidth(0.4)
        figure.add_artist(patch)
        place = (left + 1.4 * width, bottom + tall / 2)
        figure.text(*place, "masked", va="center", fontsize=FONT_POINTS - 1, color=theme.ink)


def colour_bar(
    image: Any, span: tuple[float, float], limits: Limits, look: Colouring, beside: str = "", **where: Any
) -> None:
    """`cax` takes a flat bar in axes of its own, `ax` one beside axes. An end with values beyond is pointed."""
    scale, theme = look.scale, look.theme
    # A softmax rounds to a little over 1 at times.
    below, above = span[0] < limits.low - 1e-6, span[1] > limits.high * (1 + 1e-5)
    extend = ("both" if above else "min") if below and limits.low <= 0 else ("max" if above else "neither")
    flat = "cax" in where
    bar = image.figure.colorbar(
        image, extend=extend, orientation="horizontal" if flat else "vertical",
        label=f"{scale.title}{beside}", **where
    )  # fmt: skip
    ticks = scale.ticks(limits)
    printed = [numeral(tick) for tick in ticks]
    if len("".join(printed)) > MOST_DIGITS:
        ticks, printed = [ticks[0], ticks[-1]], [printed[0], printed[-1]]
    bar.set_ticks(ticks, labels=printed)
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=FONT_POINTS - 1, length=2, width=0.5, pad=1, color=theme.line, labelcolor=theme.ink)
    (bar.ax.xaxis if flat else bar.ax.yaxis).label.set(fontsize=FONT_POINTS - 1, color=theme.ink)
    if flat:
        bar.ax.xaxis.label.set(horizontalalignment="left", x=0.0)
    bar.outline.set(linewidth=0.5, edgecolor=theme.line)


def warn_of_missing(missing: str) -> None:
    if missing:
        warnings.warn(
            f"no font has {' '.join(dict.fromkeys(missing))}: labelled by code point. pip install "
            "'regard[view]' brings Noto; the HTML page shows every script that the browser has",
            stacklevel=3,
        )
