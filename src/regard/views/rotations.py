"""How rotary positions turn pairs of dimensions: the same vector at each position, plane by plane."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from regard.call.rotary.rotary import Rotary
from regard.errors import ArgumentError, require, require_whole
from regard.views.axis_text import FONT_POINTS, TITLE_POINTS
from regard.views.figures import frame, heading_inches, new_figure, require_matplotlib, warn_of_missing, write_heading
from regard.views.layout import MARGIN, Box
from regard.views.scales import numeral
from regard.views.themes import LIGHT, Theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE, ABOVE, BETWEEN = 1.7, 0.45, 0.35
"""Inches of a plane, of its title, and between two planes."""
CLOSE = 12.0
"""Degrees between two vectors below which their numbers would touch."""


def rotations(
    rotary: Rotary, positions: int = 8, planes: Sequence[int] = (0, 1, 2), *, title: str = "", theme: Theme = LIGHT
) -> "Figure":
    r"""Draw the vector (1, 0) of some planes at positions 0, 1, ...: plane i turns by the angle $\theta_i$ a position.

    Args:
        rotary: the rotary positions.
        positions: how many positions, from 0.
        planes: the pairs of dimensions; 0 turns fastest.
        title: printed above.
        theme: `LIGHT` or `DARK`.

    Returns:
        A new figure with a plot for each plane.

    Raises:
        ArgumentError: there is no such plane, or no position.

    Source: Su et al. 2021 (arXiv:2104.09864), figure 1.

    >>> figure = rotations(Rotary(8), 4, planes=[0, 3])
    >>> [ax.get_title(loc="left") for ax in figure.axes]
    ['pair 0: 57.3° a position', 'pair 3: 0.0573° a position']
    """
    require_matplotlib()
    require(rotary, Rotary, "rotary", "a regard.Rotary")
    require_whole(positions=positions)
    pairs, planes = rotary.rotated // 2, list(planes)
    if positions < 1 or not planes or not all(0 <= plane < pairs for plane in planes):
        raise ArgumentError(
            f"rotations() draws 1 position or more of planes in [0, {pairs}); got {positions}, {planes}"
        )
    x = torch.zeros(positions, rotary.dim, dtype=torch.float64)
    first, second = rotary.layout.split(torch.arange(rotary.rotated))
    x[:, first] = 1.0
    turned = rotary.rotate(x)
    top = MARGIN + ABOVE + (0.3 if title else 0.0)
    boxes = [Box(MARGIN + BETWEEN + n * (SIDE + BETWEEN), top, SIDE, SIDE) for n in range(len(planes))]
    wide = max(boxes[-1].left + SIDE, heading_inches(title) if title else 0.0) + MARGIN
    figure, axes = new_figure(Box(0, 0, wide, top + SIDE + 2 * MARGIN), boxes, theme)
    degrees = torch.rad2deg(rotary.frequencies(positions))
    for ax, plane in zip(axes, planes, strict=True):
        # Vectors close to one another have room for the first number and the last.
        every = max(1, positions - 1) if float(degrees[plane]) < CLOSE else 1
        for position in range(positions):
            tip = float(turned[position, first[plane]]), float(turned[position, second[plane]])
            arrow = {"arrowstyle": "->", "color": theme.accents[0], "alpha": 0.25 + 0.75 * (position + 1) / positions}
            ax.annotate("", tip, (0, 0), arrowprops=arrow)
            if position % every == 0:
                place: Any = {"ha": "center", "va": "center", "fontsize": FONT_POINTS - 1, "color": theme.ink}
                ax.text(
                    1.15 * tip[0], 1.15 * tip[1] + 0.1 * (every > 1) * (1 if position else -1), str(position), **place
                )
        ax.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal", xticks=[], yticks=[], facecolor=theme.paper)
        frame(ax, theme)
        name = f"pair {plane}: {numeral(float(degrees[plane]))}° a position"
        ax.set_title(name, loc="left", fontsize=TITLE_POINTS, color=theme.ink)
    warn_of_missing(write_heading(figure, title, theme) if title else "")
    return figure
