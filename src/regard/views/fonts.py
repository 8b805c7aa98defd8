"""Fonts for every script: the font families of a label, and its text with missing characters replaced.

Fonts are tried in this order: matplotlib's configured families, the Noto fonts of the extra `view`, the system's fonts.
Noto is registered under family names of this package, so that other figures of the process stay unchanged. matplotlib
shapes and orders the text itself (3.11 and later).
"""

import importlib.util
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("manimgx_fonts", "manimgx_fonts_cjk")
"""Font packages: folders of Noto fonts without code."""


class Face(NamedTuple):
    family: str
    path: str
    number: int
    thin: bool = False
    """True for faces drawn with a stroke: Noto Sans CJK, whose weights matplotlib does not read."""


class Lettering(NamedTuple):
    text: str
    """The label, with missing characters replaced by their code points."""
    faces: tuple[Face, ...]
    missing: str

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(face.family for face in self.faces)

    def inches(self, points: float) -> float:
        return points / 72 * _ems(self.text, self.faces)


def letter(labels: Sequence[str]) -> list[Lettering]:
    """Choose fonts for all labels of one axis together: if there is kana, Han characters are drawn as Japanese."""
    script = _east_asian("".join(labels))
    return [_letter(label, script) for label in labels]


def _letter(label: str, script: str) -> Lettering:
    chosen: list[Face] = []
    needed = {char for char in label if not _draws_nothing(char)}
    for face in _faces(script):
        # matplotlib joins letters only within one font, so a font with all of the word's letters is used alone.
        if all(_has(face, char) for char in label if not _draws_nothing(char)):
            chosen, needed = [face], set()
        elif found := {char for char in needed if _has(face, char)}:
            chosen, needed = [*chosen, face], needed - found
        if not needed:
            break
    missing = "".join(char for char in dict.fromkeys(label) if char in needed)
    if missing:
        label = " ".join(f"U+{ord(char):04X}" if char in missing else char for char in label)
        chosen = [next(_faces(script)), *chosen]
    return Lettering(label, tuple(chosen), missing)


@lru_cache(maxsize=65_536)
def _ems(text: str, faces: tuple[Face, ...]) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    if not text:
        return 0.0
    fonts = FontProperties(family=[face.family for face in faces], size=1)
    width, _, _ = text_to_path.get_text_width_height_descent(text, fonts, ismath=False)
    return float(width)


def _draws_nothing(char: str) -> bool:
    # Joiners, direction marks and variation selectors draw nothing; they act on their neighbours.
    return unicodedata.category(char) in ("Cf", "Zs") or "\ufe00" <= char <= "\ufe0f"


def _has(face: Face, char: str) -> bool:
    from matplotlib.font_manager import FontPath, get_font

    return bool(get_font(FontPath(face.path, face.number)).get_char_index(ord(char)))


def _east_asian(text: str) -> str:
    if any("\u3040" <= char <= "\u30ff" for char in text):
        return "JP"
    return "KR" if any("\uac00" <= char <= "\ud7a3" for char in text) else "SC"


def _faces(script: str) -> Iterator[Face]:
    from matplotlib.font_manager import FontProperties, fontManager

    for family in FontProperties().get_family():
        path = fontManager.findfont(FontProperties(family=[family]))
        yield Face(family, path.path, path.face_index)
    packaged = _packaged(fontManager)
    # False sorts before True: fonts other than CJK, then the right CJK variant, then the others.
    yield from sorted(packaged, key=lambda face: (face.thin, not face.family.endswith(script)))
    own = {face.family for face in packaged}
    for entry in fontManager.ttflist:
        # Last Resort is left out: it has a box for every character, and boxes must be avoided here.
        if entry.name not in own and entry.size == "scalable" and "Last" not in entry.name:
            yield Face(entry.name, entry.fname, entry.index)


@cache
def _packaged(manager: Any) -> list[Face]:
    from matplotlib.font_manager import ttfFontProperty
    from matplotlib.ft2font import FT2Font

    faces = []
    for path in _font_files():
        for index in range(FT2Font(path).num_faces):
            entry = ttfFontProperty(FT2Font(path, face_index=index))
            # Weight 400 whatever the file says: matplotlib logs a missing regular weight otherwise.
            entry = replace(entry, name=f"regard {entry.name}", weight=400)
            if entry.style == "normal":
                manager.ttflist.append(entry)
                faces.append(Face(entry.name, path, index, thin="CJK" in entry.name))
    return faces


def _font_files() -> list[str]:
    found = [importlib.util.find_spec(package) for package in PACKAGES]
    folders = [Path(folder) for spec in found if spec for folder in spec.submodule_search_locations or ()]
    return [str(path) for folder in folders for path in sorted(folder.glob("*.[ot]t[fc]"))]
