r"""Token labels: the printable text of a token, and the width of a label.

>>> printable(" the\n"), printable("\u200d"), printable("a\u202eb"), printable("\u0301")
('␣the↵', 'ZWJ', 'a‹U+202E›b', '◌́')
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence

from regard.errors import ArgumentError, ShapeError, require
from regard.tensors.kinds import refuse_wrong_kinds

MARKS = {"\n": "↵", "\t": "⇥", "\x7f": "␡", "\xa0": "⍽", "\u202f": "⍽"}
"""Visible symbols for invisible characters. Every other space gets the symbol of the plain space, or alone its number,
and every other control character its picture from U+2400 on."""
NAMES = {
    "\xad": "SHY", "\u034f": "CGJ", "\u061c": "ALM", "\u200b": "ZWSP", "\u200c": "ZWNJ", "\u200d": "ZWJ",
    "\u200e": "LRM", "\u200f": "RLM", "\u2028": "LS", "\u2029": "PS", "\u2060": "WJ", "\ufeff": "BOM",
}  # fmt: skip
"""Short names of characters without a width. Others are named by their code point, such as U+202E."""
EMPTY = "∅"
DOTTED_CIRCLE = "◌"
"""Carries a combining mark without a letter."""

SPECIAL = re.compile(r"<[^<>\s]+>|\[[A-Z0-9_]+\]|⟨[^⟨⟩\s]+⟩|<\|[^<>]*\|>")
"""Control tokens such as <eos>, [CLS] and <|endoftext|>."""

_ZWNJ, _ZWJ = "\u200c", "\u200d"
_BLANK = frozenset("\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\ufffc")
"""Blank characters among Unicode's letters, marks and symbols."""
_VISIBLE_FORMATS = frozenset("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd")
"""Visible signs among Unicode's formatting characters."""


@refuse_wrong_kinds
def printable(label: str, *, limit: int = 0) -> str:
    """The label with spaces, control characters and all other invisible characters made visible.

    Characters without a width are printed by name. Active joiners (in an emoji, after an Indic virama, between Arabic
    letters) and the variation selectors of emoji stay, so that one symbol is drawn. An empty label is printed as "∅",
    and a combining mark without a letter on a dotted circle.

    Args:
        limit: the longest result in columns (see `width`); a longer label ends in "…". 0 means no limit.

    >>> printable("internationalisation", limit=8), printable("")
    ('interna…', '∅')
    """
    require(label, str, "a label", "text")
    parts = _parts(label)
    if not limit or sum(map(width, parts)) <= limit:
        return "".join(parts) or EMPTY
    kept, used = [], 1
    for part in parts:
        used += width(part)
        if used > limit:
            break
        kept.append(part)
    return "".join(kept) + "…"


def _parts(label: str) -> list[str]:
    """The label in indivisible pieces: a letter with its marks, a joined emoji, a name."""
    parts: list[str] = []
    for at, char in enumerate(label):
        before, after = label[at - 1 : at], label[at + 1 : at + 2]
        if _stays_with(before, char, after):
            parts[-1] += char
        elif name := _name(char):
            parts.append(name if len(label) == 1 else f"‹{name}›")
        elif label == char and unicodedata.category(char) == "Zs" and char not in " \xa0":
            parts.append(f"U+{ord(char):04X}")
        elif unicodedata.category(char) in ("Mn", "Mc", "Me") and _is_bare(before):
            parts.append(DOTTED_CIRCLE + char)
        elif parts and (unicodedata.category(char)[0] == "M" or (before == _ZWJ and parts[-1].endswith(_ZWJ))):
            parts[-1] += char
        else:
            parts.append(MARKS.get(char) or _visible(char))
    return parts


def _stays_with(before: str, char: str, after: str) -> bool:
    """True for an invisible character that shapes its neighbours: it needs no name."""
    if "\ufe00" <= char <= "\ufe0f":
        return bool(before) and not _is_bare(before)
    if "\U000e0020" <= char <= "\U000e007f":  # the letters of a flag
        return before == "\U0001f3f4" or "\U000e0020" <= before <= "\U000e007e"
    if char not in (_ZWJ, _ZWNJ) or not before or not after or _is_bare(after):
        return False
    emoji = char == _ZWJ and (unicodedata.category(before) in ("So", "Sk") or before == "\ufe0f")
    arabic = unicodedata.bidirectional(before) == "AL" and unicodedata.bidirectional(after) in ("AL", "NSM")
    return emoji or arabic or unicodedata.combining(before) == 9


def _is_bare(char: str) -> bool:
    """True if a combining mark after this character would lack a base."""
    return not char or bool(_name(char)) or unicodedata.category(char)[0] in "ZC"


def _name(char: str) -> str:
    if char in NAMES:
        return NAMES[char]
    invisible = unicodedata.category(char) in ("Cf", "Cs", "Co", "Zl", "Zp") and char not in _VISIBLE_FORMATS
    selector = "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"
    return f"U+{ord(char):04X}" if invisible or selector or char in _BLANK or "\x80" <= char <= "\x9f" else ""


def _visible(char: str) -> str:
    if unicodedata.category(char) == "Zs":
        return "␣"
    return chr(0x2400 + ord(char)) if ord(char) < 0x20 else char


def right_to_left(labels: Iterable[str]) -> bool:
    """True if more letters run right to left than left to right. Control tokens do not count."""
    balance = 0
    for label in labels:
        for char in "" if SPECIAL.fullmatch(label) else label:
            direction = unicodedata.bidirectional(char)
            balance += (direction in ("R", "AL")) - (direction == "L")
    return balance > 0


def width(label: str) -> int:
    """The columns of a label: 2 for a wide (CJK) character or a joined emoji, 0 for a combining mark, else 1."""
    total, joined = 0, False
    for char in label:
        joins = joined and unicodedata.category(char) in ("So", "Sk")
        if not joins and not "\U0001f3fb" <= char <= "\U0001f3ff":
            total += _columns(char)
        joined = char == _ZWJ
    return total


def _columns(char: str) -> int:
    if unicodedata.east_asian_width(char) in "WF":
        return 2
    return int(unicodedata.category(char) not in ("Mn", "Me", "Cf") or char in _VISIBLE_FORMATS)


def axis_labels(labels: Sequence[str] | None, count: int, axis: str) -> list[str]:
    """One label for each of `count` tokens: the given labels, or the positions from 0.

    >>> axis_labels(None, 3, "rows")
    ['0', '1', '2']
    """
    if labels is None:
        return [str(position) for position in range(count)]
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise ArgumentError(f"{axis} must be a list of strings, one a token; got {labels!r:.80}")
    if len(labels) != count:
        raise ShapeError(f"{axis} must hold one label a token: {count} expected, {len(labels)} came")
    return list(labels)
