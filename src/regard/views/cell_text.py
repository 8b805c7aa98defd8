"""Weights as numbers in the cells of a heatmap, in a size that fits when the figure is drawn."""

from typing import TYPE_CHECKING

from regard.views.axis_text import FONT_POINTS
from regard.views.drawing import Drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_POINTS = 4.5
"""The smallest font of a number."""
CHARACTERS = 5.2
"""The width of a cell in halves of a font size: four digits with a point, and their margins."""
MOST_NUMBERS = 4_096
"""The most cells with numbers: more are too many to read, and take seconds to draw."""


def write_weights(ax: "Axes", one: Drawn) -> None:
    """Print each weight that is not masked in its cell; nothing where a cell is too small for it."""
    from regard.views.fitting import Fitting

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
