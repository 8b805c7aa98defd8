"""Fonts for every script: which font families draw a label, and what to print where none does.

Fonts are tried in this order: the families that matplotlib is set to use, the Noto fonts of the
extra `view`, the fonts of the system. Noto is registered under family names of our own, so that
no other figure of the process changes. matplotlib shapes and orders the text itself (3.11 and later).
"""

import importlib.util
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

# Packages that are folders of Noto fonts, without code of their own.
PACKAGES = ("manimgx_fonts", "manimgx_fonts_cjk")


class Face(NamedTuple):
    """One face of a font file."""

    family: str
    path: str
    number: int
    thin: bool = False
    """A thin cut, to be drawn with a stroke: Noto Sans CJK as matplotlib reads it, without its weights."""


class Lettering(NamedTuple):
    """How to draw one label."""

    text: str
    """The label, with the code point in place of a character that no font has."""
    families: tuple[str, ...]
    """Font families for matplotlib, tried glyph by glyph in this order."""
    thin: bool
    """Whether one of them is a thin cut."""
    missing: str
    """The characters that no font has; mostly empty."""


def letter(labels: Sequence[str]) -> list[Lettering]:
    """Choose fonts for the labels of one axis, together: kana among them make Han characters Japanese.

    Returns:
        One lettering a label.

    >>> [lettering.text for lettering in letter(["2026年", "月"])]
    ['2026年', '月']
    """
    script = _east_asian("".join(labels))
    return [_letter(label, script) for label in labels]


def _letter(label: str, script: str) -> Lettering:
    chosen: list[Face] = []
    needed = {char for char in label if not _draws_nothing(char)}
    for face in _faces(script):
        # A word's letters are joined within one font only: a font that has them all stands alone.
        if all(_has(face, char) for char in label if not _draws_nothing(char)):
            chosen, needed = [face], set()
        elif found := {char for char in needed if _has(face, char)}:
            chosen, needed = [*chosen, face], needed - found
        if not needed:
            break
    missing = "".join(char for char in dict.fromkeys(label) if char in needed)
    if missing:
        label, chosen = _spelt(label, missing), [next(_faces(script)), *chosen]
    return Lettering(label, tuple(face.family for face in chosen), any(face.thin for face in chosen), missing)


def _draws_nothing(char: str) -> bool:
    # Joiners, direction marks and variation selectors act on their neighbours.
    return unicodedata.category(char) in ("Cf", "Zs") or "\ufe00" <= char <= "\ufe0f"


def _spelt(label: str, missing: str) -> str:
    return " ".join(f"U+{ord(char):04X}" if char in missing else char for char in label)


def _has(face: Face, char: str) -> bool:
    from matplotlib.font_manager import FontPath, get_font

    return bool(get_font(FontPath(face.path, face.number)).get_char_index(ord(char)))


def _east_asian(text: str) -> str:
    """The cut of Noto Sans CJK that suits the text: Japanese, Korean or simplified Chinese."""
    if any("\u3040" <= char <= "\u30ff" for char in text):
        return "JP"
    return "KR" if any("\uac00" <= char <= "\ud7a3" for char in text) else "SC"


def _faces(script: str) -> Iterator[Face]:
    """Every font there is, best first; the system's are opened only when a character is still missing."""
    from matplotlib.font_manager import FontProperties, fontManager

    for family in FontProperties().get_family():
        path = fontManager.findfont(FontProperties(family=[family]))
        yield Face(family, path.path, path.face_index)
    packaged = _packaged(fontManager)
    # False sorts before True: all that is not CJK, then the cut that suits, then the other cuts.
    yield from sorted(packaged, key=lambda face: (face.thin, not face.family.endswith(script)))
    own = {face.family for face in packaged}
    for entry in fontManager.ttflist:
        # Last Resort has a box for every character, which is what we are here to avoid.
        if entry.name not in own and entry.size == "scalable" and "Last" not in entry.name:
            yield Face(entry.name, entry.fname, entry.index)


@cache
def _packaged(manager: Any) -> list[Face]:
    """The Noto fonts of the extra `view`, registered with matplotlib's font manager."""
    from matplotlib.font_manager import ttfFontProperty
    from matplotlib.ft2font import FT2Font

    faces = []
    for path in _font_files():
        for index in range(FT2Font(path).num_faces):
            entry = ttfFontProperty(FT2Font(path, face_index=index))
            # As weight 400 whatever the file says, or matplotlib logs that it found no regular weight.
            entry = replace(entry, name=f"regard {entry.name}", weight=400)
            if entry.style == "normal":
                manager.ttflist.append(entry)
                faces.append(Face(entry.name, path, index, thin="CJK" in entry.name))
    return faces


def _font_files() -> list[str]:
    found = [importlib.util.find_spec(package) for package in PACKAGES]
    folders = [Path(folder) for spec in found if spec for folder in spec.submodule_search_locations or ()]
    return [str(path) for folder in folders for path in sorted(folder.glob("*.[ot]t[fc]"))]
