r"""Token labels: the printed text of a token, the direction of its script, and the width of a label.

>>> printable(" the\n"), printable("")
('␣the↵', '')
"""

import unicodedata
from collections.abc import Iterable, Sequence

from regard.errors import ArgumentError, ShapeError

MARKS = {"\n": "↵", "\t": "⇥", "\x7f": "␡", "\xa0": "⍽", "\u202f": "⍽"}
"""Visible symbols for characters that print as nothing.

Every other space gets the symbol of the plain space, and every other control character its picture from U+2400 on.
"""


def printable(label: str, *, limit: int = 0) -> str:
    """The label with spaces and control characters made visible.

    Args:
        limit: the longest result in characters; a longer label ends in "…". 0 means no limit.

    >>> printable("internationalisation", limit=8)
    'interna…'
    """
    text = "".join(MARKS.get(char) or _visible(char) for char in label)
    return text if not limit or len(text) <= limit else text[: limit - 1] + "…"


def _visible(char: str) -> str:
    if unicodedata.category(char) == "Zs":
        return "␣"
    return chr(0x2400 + ord(char)) if ord(char) < 0x20 else char


def right_to_left(labels: Iterable[str]) -> bool:
    """Whether more letters of the labels run right to left than left to right.

    >>> right_to_left(["السبت", "2026"]), right_to_left(["samedi"])
    (True, False)
    """
    balance = 0
    for char in "".join(labels):
        direction = unicodedata.bidirectional(char)
        balance += (direction in ("R", "AL")) - (direction == "L")
    return balance > 0


def width(label: str) -> int:
    """The columns that the label takes: 2 for a wide (CJK) character, 0 for a combining mark, else 1.

    >>> width("2026年"), width("नवंबर")
    (6, 4)
    """
    return sum(
        2 if unicodedata.east_asian_width(char) in "WF" else unicodedata.category(char) not in ("Mn", "Me", "Cf")
        for char in label
    )


def axis_labels(labels: Sequence[str] | None, count: int, axis: str) -> list[str]:
    """One label for each of `count` tokens: the given labels, or the positions from 0.

    Raises:
        ShapeError: the number of labels differs from `count`.
        ArgumentError: a label is not a string.

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
