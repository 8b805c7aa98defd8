"""Curves of numbers over one axis: columns of a table of positions, kernel regression with its points and its truth."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from regard.errors import NonFiniteError, ShapeError
from regard.views.axis_text import FONT_POINTS
from regard.views.charts import name_axes, plot_of_lines
from regard.views.figures import require_matplotlib, text_style, warn_of_missing
from regard.views.fonts import letter
from regard.views.themes import LIGHT, Theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DASHES = ("-", "--", "-.", ":")
"""The strokes of neighbouring curves, which differ without colour too."""


def curves(
    x: Any,
    y: Any,
    names: Sequence[str] = (),
    *,
    points: tuple[Any, Any] | None = None,
    truth: Any = None,
    band: Any = None,
    title: str = "",
    axis_titles: tuple[str, str] = ("", ""),
    theme: Theme = LIGHT,
) -> "Figure":
    """Draw one curve or several over the same x.

    Args:
        x: (n,) numbers, a tensor, an array, a list or a range.
        y: (n,), or (n, curves) with a curve in each column: columns of a table of positions, estimates of several
            widths.
        names: a name for each curve, printed in a legend.
        points: x and y of samples, drawn as dots.
        truth: (n,), drawn as a thin dashed line.
        band: (n,) distances from the first curve to both edges of a shaded band around it, such as two standard errors.
        title: printed above.
        axis_titles: the titles of the axes, across and up.
        theme: `LIGHT` or `DARK`.

    Returns:
        A new figure.

    Raises:
        ShapeError: the lengths differ, or there is not one name for each curve.
        NonFiniteError: an x is NaN or infinite. A curve has a gap where its y is.
        MissingExtraError: matplotlib is not installed.

    >>> from regard.nn import SinusoidalPositions
    >>> table = SinusoidalPositions(32)(torch.zeros(60, 32))
    >>> figure = curves(range(60), table[:, 6:10], [f"column {n}" for n in range(6, 10)])
    >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    ['column 6', 'column 7', 'column 8', 'column 9']
    """
    require_matplotlib()
    across, table = _numbers(x, "x"), _numbers(y, "y")
    table = table[:, None] if table.ndim == 1 else table
    _check(across, table, names)
    figure, ax, missing = plot_of_lines(title, theme)
    for place, column in enumerate(table.T):
        style: Any = {"color": theme.accents[place % len(theme.accents)], "linestyle": DASHES[place % len(DASHES)]}
        ax.plot(across, column, linewidth=1.4, label=names[place] if names else None, **style)
    if band is not None:
        width = _column(band, "band", across)
        ax.fill_between(
            across, table[:, 0] - width, table[:, 0] + width, color=theme.accents[0], alpha=0.18, linewidth=0
        )
    if truth is not None:
        ax.plot(
            across,
            _column(truth, "truth", across),
            color=theme.ink,
            linewidth=0.9,
            linestyle=(0, (4, 3)),
            label="truth",
        )
    if points is not None:
        px, py = (_numbers(one, "points") for one in points)
        _column(py, "the y of points", px)
        ax.plot(px, py, "o", markersize=3, color=theme.ink, alpha=0.5, linewidth=0, label="data")
    if names or truth is not None or points is not None:
        missing += _legend(ax, theme)
    name_axes(ax, *axis_titles, theme)
    warn_of_missing(missing)
    return figure


def _legend(ax: Any, theme: Theme) -> str:
    missing = ""
    legend = ax.legend(fontsize=FONT_POINTS, frameon=False, labelcolor=theme.ink)
    for text in legend.get_texts():
        (lettering,) = letter([text.get_text()])
        text.set(text=lettering.text, parse_math=False, **text_style(lettering, theme))
        missing += lettering.missing
    return missing


def _numbers(given: Any, name: str) -> npt.NDArray[np.float64]:
    given = given.detach().cpu().double() if isinstance(given, torch.Tensor) else given
    try:
        return np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"{name} must be numbers: {error}") from None


def _column(given: Any, name: str, across: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    column = _numbers(given, name)
    if column.shape != across.shape:
        raise ShapeError(f"{name} must have one number for each x, {across.shape}; got {column.shape}")
    return column


def _check(across: npt.NDArray[np.float64], table: npt.NDArray[np.float64], names: Sequence[str]) -> None:
    if across.ndim != 1 or table.ndim != 2 or len(table) != len(across) or not table.size:
        raise ShapeError(f"y must be (n,) or (n, curves) for x of (n,); got {table.shape} for {across.shape}")
    if names and len(names) != table.shape[1]:
        raise ShapeError(f"names must be one for each of {table.shape[1]} curves; got {len(names)}")
    if not np.isfinite(across).all():
        raise NonFiniteError("x must be finite; NaN or infinity came")
