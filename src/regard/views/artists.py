"""Our own artists of matplotlib: figures that show themselves, labels that fit, and strokes for thin fonts.

Figures and axes show themselves at the end of a notebook's cell, with `%matplotlib inline` and without it.
"""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontPath, get_font
from matplotlib.path import Path
from matplotlib.patheffects import AbstractPathEffect
from matplotlib.textpath import text_to_path

from regard.lazy import Bundle
from regard.views.fonts import Lettering

CSS_PIXELS = 96
"""Pixels of a page in an inch, by the definition of CSS."""
POINTS = 0.15
"""Width of the stroke in points. It makes Noto Sans CJK as heavy as other fonts."""


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


class Fitting(Artist):
    """Draws nothing. Before the axis of its axes is drawn, it lets the labels be chosen for the size of now."""

    def __init__(self, choose: Callable[[], object]) -> None:
        super().__init__()
        self._choose = choose
        # A hook below all others is called first.
        self.set(zorder=-1_000, in_layout=False)

    def draw(self, renderer: Any) -> None:
        self._choose()


class ThinStroke(AbstractPathEffect):
    """A stroke for the glyphs of thin fonts alone: matplotlib reads only the thinnest weight of Noto Sans CJK, and a
    stroke around the whole text would embolden other letters."""

    def __init__(self, lettering: Lettering) -> None:
        super().__init__()
        self._lettering = lettering

    def draw_path(self, renderer: Any, gc: Any, tpath: Path, affine: Any, rgbFace: Any = None) -> None:
        renderer.draw_path(gc, tpath, affine, rgbFace)
        thin = thin_vertices(self._lettering)
        # A text of several lines comes line by line; it is thin as a whole, or else not stroked.
        everywhere = all(face.thin for face in self._lettering.faces)
        count = len(np.asarray(tpath.vertices))
        if len(thin) != count:
            thin = np.full(count, everywhere)
        if not thin.any():
            return
        stroke = renderer.new_gc()
        stroke.copy_properties(gc)
        stroke.set_foreground(rgbFace)
        stroke.set_linewidth(renderer.points_to_pixels(POINTS))
        vertices, codes = np.asarray(tpath.vertices), tpath.codes
        part = Path(vertices[thin], None if codes is None else np.asarray(codes)[thin])
        renderer.draw_path(stroke, part, affine, rgbFace)
        stroke.restore()


def thin_vertices(lettering: Lettering) -> np.ndarray:
    font = get_font([FontPath(face.path, face.number) for face in lettering.faces])
    font.set_size(text_to_path.FONT_SCALE, text_to_path.DPI)
    # A glyph is named after its font.
    thin = tuple(get_font(FontPath(face.path, face.number)).postscript_name for face in lettering.faces if face.thin)
    glyphs, paths, _ = text_to_path.get_glyphs_with_font(font, lettering.text)
    flags = [np.full(len(paths[name][0]), name.startswith(thin) if thin else False) for name, *_ in glyphs]
    return np.concatenate([*flags, np.zeros(0, bool)])
