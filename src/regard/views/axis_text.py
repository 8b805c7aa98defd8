"""Axis labels as drawn: fonts, space and orientation."""

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from regard.views.fonts import Lettering, letter
from regard.views.labels import printable

FONT_POINTS, TITLE_POINTS = 8, 9
"""Font sizes of labels and titles in points."""
LABEL_COLUMNS = 24
"""The longest label in columns of text. The rest of a longer label becomes "…"."""
APART = 0.035
"""The least inches between two labels."""
LONGEST_TITLE = 60
"""The most characters of a title: a longer one would widen the picture."""
LINE = 0.16
"""Inches of a line of text, for labels of FONT_POINTS."""
_STACKED_LINE = 0.15
_MOST_STACKED = 8

Turn = Literal["upright", "stacked", "turned"]
"""A label in one line, with one character below the other, or turned by a right angle."""


class AxisLabel(NamedTuple):
    lettering: Lettering
    inches: float
    """Its width in one line."""
    is_stackable: bool
    """True for Chinese, Japanese and Korean: written downwards where a horizontal label does not fit."""

    def turn(self, room: float) -> Turn:
        if self.inches + APART <= room:
            return "upright"
        return "stacked" if self.is_stackable else "turned"

    def height(self, room: float) -> float:
        turn = self.turn(room)
        if turn == "stacked":
            return _STACKED_LINE * len(self.lettering.text) + 0.03
        return LINE if turn == "upright" else self.inches

    def written(self, room: float) -> str:
        return "\n".join(self.lettering.text) if self.turn(room) == "stacked" else self.lettering.text


def measured(labels: Sequence[str], *, space: str = "␣") -> list[AxisLabel]:
    found = letter([printable(label, limit=LABEL_COLUMNS).replace("␣", space) for label in labels])
    stackable = (len(s) <= _MOST_STACKED and all(unicodedata.east_asian_width(c) in "WF" for c in s) for s, *_ in found)
    return [AxisLabel(one, one.inches(FONT_POINTS), fits) for one, fits in zip(found, stackable, strict=True)]


def widest(labels: Sequence[AxisLabel]) -> float:
    return max(label.inches for label in labels)


def label_step(count: int, side: float) -> int:
    """The step n, if every n-th of `count` labels is printed along so many inches."""
    return max(1, -(-round(1.25 * FONT_POINTS / 72 * count * 100) // round(side * 100)))


def shown(labels: Sequence[AxisLabel], side: float) -> Iterator[tuple[int, AxisLabel]]:
    return ((place, labels[place]) for place in range(0, len(labels), label_step(len(labels), side)))


def room(count: int, side: float) -> float:
    return side / count * label_step(count, side)


def room_above(labels: Sequence[AxisLabel], side: float) -> float:
    return max(label.height(room(len(labels), side)) for _, label in shown(labels, side))


def short_title(title: str) -> str:
    """The title, cut to its most characters.

    >>> len(short_title("a sentence " * 9))
    60
    """
    return title if len(title) <= LONGEST_TITLE else f"{title[: LONGEST_TITLE - 1]}…"
