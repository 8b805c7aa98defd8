"""A map as text: coloured half-blocks for a terminal, a plain table for everything else. Columns fit Chinese, Japanese
and Korean characters; two queries share a line of half-blocks. Needs no packages."""

import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.tensors.kinds import refuse_wrong_kinds
from regard.views.colours import DARK, Colour, Theme, hexadecimal
from regard.views.drawing import Colouring, Panel, note_of, ordered, read
from regard.views.labels import printable, width
from regard.views.masked import Cells
from regard.views.scales import ColourScale, Limits, Numbers, ScaleName, numeral
from regard.views.values import Pooling

LABEL_COLUMNS = 16
"""The longest label in columns of text."""
NARROW = 2
"""Columns of a key without space for its label: one wide character fits."""
MOST_PRINTED = 64
"""The most queries and keys of a table; a longer map is pooled."""
UPPER_HALF = "▀"
LEGEND = 12
"""The colour steps of the legend."""


@dataclass(frozen=True, slots=True, eq=False)
class Printed:
    values: Numbers
    hidden: Cells
    rows: list[str]
    columns: list[str]
    note: str
    scale: ColourScale
    limits: Limits


class Printing(ABC):
    """A way to write a map as text."""

    @abstractmethod
    def most_cells(self, rows: Sequence[str]) -> int:
        """The most queries and keys that fit beside the labels of the queries."""

    @abstractmethod
    def written(self, shown: Printed) -> str:
        """The lines, without a line break at the end."""


@dataclass(frozen=True, slots=True)
class Table(Printing):
    """Values with three decimals in aligned columns; a dot marks a masked pair."""

    most: int = MOST_PRINTED

    def most_cells(self, rows: Sequence[str]) -> int:
        return self.most

    def written(self, shown: Printed) -> str:
        numbers = [
            ["·" if hidden else f"{value:.3f}" for value, hidden in zip(*line, strict=True)]
            for line in zip(shown.values, shown.hidden, strict=True)
        ]
        lines = [["", *shown.columns], *([label, *line] for label, line in zip(shown.rows, numbers, strict=True))]
        wide = [max(map(width, column)) for column in zip(*lines, strict=True)]
        # The labels of queries begin at the left, all others end at the right.
        text = ["  ".join([_left(line[0], wide[0]), *map(_right, line[1:], wide[1:])]).rstrip() for line in lines]
        return "\n".join([*text, *([shown.note] if shown.note else [])])


@dataclass(frozen=True, slots=True)
class HalfBlocks(Printing):
    """Cells in colours, two queries a line, for a terminal of so many columns."""

    across: int = 80
    theme: Theme = DARK
    has_all_colours: bool = True
    """True for terminals with 24-bit colours; others get the nearest of 256."""

    def most_cells(self, rows: Sequence[str]) -> int:
        longest = max(width(printable(label, limit=LABEL_COLUMNS)) for label in rows)
        room = (self.across - 2 * longest - 4) // NARROW
        if len(rows) > room:
            room = (self.across - 2 * min(LABEL_COLUMNS, 2 * longest + 1) - 4) // NARROW
        return max(1, room)

    def written(self, shown: Printed) -> str:
        left = [" / ".join(shown.rows[at : at + 2]) for at in range(0, len(shown.rows), 2)]
        margin = max(map(width, left))
        room = max(max(map(width, shown.columns)) + 1, NARROW)
        is_flat = margin + 1 + room * len(shown.columns) <= self.across
        room = room if is_flat else NARROW
        head = [shown.columns] if is_flat else _downwards(shown.columns)
        lines = [" " * (margin + 1) + "".join(_left(label, room) for label in line) for line in head]
        colours = self._colours(shown)
        for at, label in enumerate(left):
            lines.append(f"{_left(label, margin)} {self._line(colours[2 * at : 2 * at + 2], room)}")
        notes = [shown.note] if shown.note else []
        return "\n".join([*(line.rstrip() for line in lines), self._legend(shown), *notes])

    def _colours(self, shown: Printed) -> list[list[Colour]]:
        signed = shown.limits.low < 0
        ramp = self.theme.signed_colours() if signed else self.theme.colours()
        steps = np.minimum((shown.scale.shares(shown.values, shown.limits) * len(ramp)).astype(int), len(ramp) - 1)
        masked = _triple(self.theme.masked)
        return [
            [masked if hidden else ramp[step] for step, hidden in zip(*line, strict=True)]
            for line in zip(steps, shown.hidden, strict=True)
        ]

    def _line(self, pair: list[list[Colour]], room: int) -> str:
        """Two queries, one in the upper half; an odd last one has paper below."""
        lower: Sequence[Colour | None] = pair[1] if len(pair) == 2 else [None] * len(pair[0])
        cells = (
            f"\x1b[{self._code(above, 38)}{'' if below is None else ';' + self._code(below, 48)}m"
            f"{UPPER_HALF * room}\x1b[0m"
            for above, below in zip(pair[0], lower, strict=True)
        )
        return "".join(cells)

    def _legend(self, shown: Printed) -> str:
        limits = shown.limits
        part = Printed(
            shown.scale.values((np.arange(LEGEND) + 0.5) / LEGEND, limits)[None], np.zeros((1, LEGEND), bool),
            [""], [""] * LEGEND, "", shown.scale, limits,
        )  # fmt: skip
        bar = "".join(f"\x1b[{self._code(colour, 48)}m \x1b[0m" for colour in self._colours(part)[0])
        masked = f"  \x1b[{self._code(_triple(self.theme.masked), 48)}m  \x1b[0m masked" if shown.hidden.any() else ""
        return f"{numeral(limits.low)} {bar} {numeral(limits.high)} {shown.scale.title}{masked}"

    def _code(self, colour: Colour, ground: int) -> str:
        """The SGR parameters of the foreground (38) or background (48) colour."""
        red, green, blue = (round(255 * channel) for channel in colour)
        if self.has_all_colours:
            return f"{ground};2;{red};{green};{blue}"
        # 6 x 6 x 6 colours; their levels are 0, 95, 135, ..., 255.
        red, green, blue = (0 if level < 48 else max(1, round((level - 55) / 40)) for level in (red, green, blue))
        return f"{ground};5;{16 + 36 * red + 6 * green + blue}"


def printing_of(stream: Any = None) -> Printing:
    """Half-blocks for a terminal, a table for pipes, files and `NO_COLOR` (https://no-color.org)."""
    stream = sys.stdout if stream is None else stream
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if is_plain or not (hasattr(stream, "isatty") and stream.isatty()):
        return Table()
    colours = os.environ.get("COLORTERM", "") in ("truecolor", "24bit")
    return HalfBlocks(shutil.get_terminal_size().columns, has_all_colours=colours)


@refuse_wrong_kinds
def map_text(
    weights: Any,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    printing: Printing | None = None,
    scale: ScaleName | ColourScale = "sqrt",
    limits: tuple[float, float] | None = None,
    without_sink: bool = False,
    mask: Any = None,
    pooling: Pooling = "max",
) -> str:
    """One map as text for `print`.

    Args:
        weights: (T, S), an `AttentionMap`, a tensor or an array.
        rows: T labels, or None for positions from 0.
        columns: S labels; None for those of the rows if T = S, or else positions from 0.
        printing: `HalfBlocks` or `Table`; None for standard output's.
        scale: the colour of a weight, as in `heatmap`.
        limits, without_sink, mask: as in `heatmap`.
        pooling: as in `heatmap`, for maps beyond the width; a line then says so.

    Returns:
        The lines. Control characters in labels are printed by name.

    Raises:
        RegardError: as `heatmap`.

    >>> import torch
    >>> print(map_text(torch.tensor([[1.0, 0.0], [0.25, 0.75]]), ["le", "chat"], printing=Table()))
             le   chat
    le    1.000  0.000
    chat  0.250  0.750
    """
    how = printing_of() if printing is None else printing
    look = Colouring.chosen(scale, limits, without_sink, DARK)
    shape = tuple(getattr(weights, "shape", ()))
    if columns is None and len(shape) == 2 and shape[0] == shape[1]:
        columns = rows
    if isinstance(rows, str):
        raise ArgumentError(f"rows must be a list of strings, one a token; got {rows!r:.80}")
    places = how.most_cells(rows or [str(place) for place in range(shape[0] if shape else 1)] or [""])
    panel = Panel(weights, rows, columns, mask=mask)
    found, hidden, counted = read(panel, look, max_cells=places, pooling=pooling)
    values = look.scale.prepared(found.values, counted)
    ends = look.limits or look.scale.limits(values[counted])
    order = ordered(found, columns)
    short = [[printable(label, limit=LABEL_COLUMNS) for label in labels] for labels in (found.rows, found.columns)]
    numbers = values if isinstance(how, HalfBlocks) else found.values
    return how.written(
        Printed(
            numbers[:, order], hidden[:, order], short[0], [short[1][place] for place in order],
            note_of(found, pooling), look.scale, ends,
        )
    )  # fmt: skip


def _downwards(labels: Sequence[str]) -> list[list[str]]:
    split = [_letters(label) for label in labels]
    tall = max(map(len, split))
    return [list(line) for line in zip(*([""] * (tall - len(one)) + one for one in split), strict=True)]


def _letters(label: str) -> list[str]:
    pieces: list[str] = []
    for char in label:
        if pieces and (width(char) == 0 or width(pieces[-1] + char) == width(pieces[-1])):
            pieces[-1] += char
        else:
            pieces.append(char)
    return pieces


def _left(text: str, columns: int) -> str:
    return text + " " * (columns - width(text))


def _right(text: str, columns: int) -> str:
    return " " * (columns - width(text)) + text


def _triple(colour: str) -> Colour:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    assert hexadecimal((red, green, blue)) == colour
    return red, green, blue
