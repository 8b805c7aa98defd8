"""The places of the maps in a figure, in inches: cells have one size, and rows take as many panels as fit.

This is arithmetic over the labels, without matplotlib. A figure is laid out before it exists, so that cells are square
and labels have room, whatever the script and the number of tokens are.
"""

from collections.abc import Sequence
from typing import NamedTuple

from regard.views.labels import printable, width
from regard.views.values import Picture

FONT_POINTS, TITLE_POINTS = 8, 9
"""Font sizes of labels and titles in points."""
CELL, GLYPH, LINE = 0.19, 0.074, 0.16
"""Inches of a cell, of a column of label text, and of a line of text, for labels of FONT_POINTS."""
GAP, MARGIN, SHORTEST_SIDE = 0.3, 0.15, 0.4
"""In inches: the gap between panels, the margin of the figure, and the smallest side of a map."""
COLOUR_BAR = 0.5
"""Inches that the colour bar takes at the foot of the figure."""

LABEL_CHARACTERS = 24
"""The longest label in characters as printed. The rest of a longer label becomes "…"."""


class Box(NamedTuple):
    """A rectangle in inches from the top left corner of the figure."""

    left: float
    top: float
    width: float
    height: float


class FigureSize(NamedTuple):
    """The inches that one panel needs."""

    width: float
    height: float
    left: float
    """Room for the row labels."""
    above: float
    """Room for the title and the column labels."""
    title: float
    """The width of the title."""


def panel_size(drawn: Picture, title: str, *, longest_side: float) -> FigureSize:
    """The inches that a map takes with its labels. Its cells are squares, unless one side would be too narrow."""
    rows, columns = drawn.values.shape
    cell = min(CELL, longest_side / max(rows, columns))
    across = max(SHORTEST_SIDE, columns * cell)
    label = 1 if upright(drawn.columns, across) else GLYPH * longest(drawn.columns) / LINE
    return FigureSize(
        width=across,
        height=max(SHORTEST_SIDE, rows * cell),
        left=GLYPH * longest(drawn.rows) + 0.08,
        above=LINE * (label + 1.5 * bool(title)) + 0.06,
        title=GLYPH * TITLE_POINTS / FONT_POINTS * width(title),
    )


def longest(labels: Sequence[str]) -> int:
    """The width of the longest label as printed, in columns of text."""
    return max(width(printable(label, limit=LABEL_CHARACTERS)) for label in labels)


def upright(labels: Sequence[str], across: float) -> bool:
    """Whether the labels fit side by side into so many inches without being turned."""
    return GLYPH * (longest(labels) + 0.5) <= across / len(labels)


def label_step(count: int, side: float) -> int:
    """The step n, if every n-th of `count` labels is printed along so many inches."""
    return max(1, -(-round(1.1 * FONT_POINTS / 72 * count * 100) // round(side * 100)))


def flow(sizes: Sequence[FigureSize], *, across: int | None = None, title: float = 0.0) -> tuple[Box, list[Box]]:
    """Place panels in rows, like words in a paragraph. Returns the figure, and a box for each map.

    Args:
        sizes: the inches that the panels need.
        across: the number of panels in a row; None fills rows to a width that makes the figure about 3 to 2.
        title: the width of the figure's title in inches; 0 means no title.

    Returns:
        The figure, with room for a colour bar at its foot, and the boxes of the maps without their labels.

    >>> one = FigureSize(width=1.0, height=1.0, left=0.5, above=0.5, title=0.0)
    >>> figure, boxes = flow([one, one, one], across=2)
    >>> [(round(box.left, 2), round(box.top, 2)) for box in boxes]
    [(0.65, 0.65), (2.45, 0.65), (0.65, 2.45)]
    """
    rows = [list(range(i, min(i + across, len(sizes)))) for i in range(0, len(sizes), across)] if across else []
    boxes: list[Box] = []
    top = MARGIN + 1.5 * LINE * bool(title)
    for row in rows or _fill(sizes):
        above = max(sizes[i].above for i in row)
        left = MARGIN
        for i in row:
            boxes.append(Box(left + sizes[i].left, top + above, sizes[i].width, sizes[i].height))
            left += _outer(sizes[i])
        top += above + max(sizes[i].height for i in row) + GAP
    right = max(box.left - size.left + _outer(size) for box, size in zip(boxes, sizes, strict=True)) - GAP
    return Box(0, 0, max(right, title) + MARGIN, top - GAP + COLOUR_BAR + MARGIN), boxes


def _fill(sizes: Sequence[FigureSize]) -> list[list[int]]:
    """The panels of each row. Rows are filled up to a width that makes the whole about 3 to 2."""
    area = sum(_outer(size) * (size.above + size.height + GAP) for size in sizes)
    limit = max((1.5 * area) ** 0.5, max(_outer(size) for size in sizes))
    rows: list[list[int]] = [[]]
    used = 0.0
    for i, size in enumerate(sizes):
        if rows[-1] and used + _outer(size) > limit + 0.01:
            rows.append([])
            used = 0.0
        rows[-1].append(i)
        used += _outer(size)
    return rows


def _outer(size: FigureSize) -> float:
    """The width of a panel in its row in inches, including the gap to the next panel."""
    return size.left + max(size.width, size.title) + GAP
