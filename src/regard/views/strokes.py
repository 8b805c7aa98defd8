"""A stroke for the glyphs of thin fonts alone, so that a text of several scripts is of one weight. matplotlib reads
only the thinnest weight of Noto Sans CJK. A stroke around the whole text would embolden other letters."""

from typing import Any

import numpy as np
from matplotlib.font_manager import FontPath, get_font
from matplotlib.path import Path
from matplotlib.patheffects import AbstractPathEffect
from matplotlib.textpath import text_to_path

from regard.views.fonts import Lettering

POINTS = 0.15
"""Width of the stroke in points. It makes Noto Sans CJK as heavy as other fonts."""


class ThinStroke(AbstractPathEffect):
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
