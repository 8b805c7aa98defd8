"""Figures and axes that show themselves at the end of a notebook's cell, with `%matplotlib inline` and without it."""

import io
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regard.lazy import Bundle

CSS_PIXELS = 96
"""Pixels of a page in an inch, by the definition of CSS."""


def png_bundle(figure: Figure) -> Bundle:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    width, height = (round(CSS_PIXELS * inches) for inches in figure.get_size_inches())
    return {"image/png": file.getvalue(), "text/plain": repr(figure)}, {"image/png": {"width": width, "height": height}}


class ShownFigure(Figure):
    """A figure without pyplot. A notebook shows it once: IPython asks no other formatter for the same MIME type."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return png_bundle(self)


class ShownAxes(Axes):
    """Axes of such a figure: a notebook shows the whole figure."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        figure = self.get_figure(root=True)
        return ({"text/plain": repr(self)}, {}) if figure is None else png_bundle(figure)
