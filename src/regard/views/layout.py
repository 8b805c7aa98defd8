"""The positions of the maps in a figure, in inches: cells have one size, and rows take as many panels as fit. A figure
is laid out before it is created, so that cells are square and labels have room in every script and length."""

from collections.abc import Sequence
from typing import NamedTuple

from regard.views.axis_text import LINE, AxisLabel, room_above, widest

CELL, LARGEST_CELL, GAP, MARGIN, SHORTEST_SIDE = 0.19, 0.6, 0.3, 0.15, 0.4
"""In inches: a cell of many, the largest cell, the gap between panels, the margin of the figure, and the smallest side
of a map."""
COLOUR_BAR = 0.56
"""Inches of the colour bar at the foot of the figure."""
WIDEST_ROW = 8.6
"""Inches of panels that stand in one row: the width of a notebook, and of a screen at 96 dots an inch."""
NARROWEST = 3.6
"""The least inches across a figure, for the colour bar and its note."""


class Box(NamedTuple):
    left: float
    top: float
    width: float
    height: float


class Sides(NamedTuple):
    usual: float
    """For a few words: their cells grow up to LARGEST_CELL to fill it."""
    longest: float
    """For many: their cells shrink to keep within it."""


class FigureSize(NamedTuple):
    width: float
    height: float
    left: float
    above: float
    title: float


def panel_size(
    rows: Sequence[AxisLabel], columns: Sequence[AxisLabel], title: float, *, sides: Sides, axis_titles: float = 0.0
) -> FigureSize:
    """Inches of a map with labels, from those of its titles (0 for none); cells are squares where they can be."""
    count = max(len(rows), len(columns))
    cell = min(max(CELL, min(LARGEST_CELL, sides.usual / count)), sides.longest / count)
    across = max(SHORTEST_SIDE, len(columns) * cell)
    return FigureSize(
        width=across,
        height=max(SHORTEST_SIDE, len(rows) * cell),
        left=widest(rows) + 0.12 + axis_titles,
        above=room_above(columns, across) + LINE * 1.5 * bool(title) + 0.08 + axis_titles,
        title=title,
    )


def flow(
    sizes: Sequence[FigureSize], *, across: int | None = None, title: float = 0.0, has_bar: bool = True
) -> tuple[Box, list[Box]]:
    """Place panels in rows, like words in a paragraph. Returns the figure, and a box for each map.

    Without `across`, panels that fit a screen stand in one row, and others make a figure of about 3 to 2; with it, the
    panels of a column begin at one line. `title` is the width of the figure's title in inches, 0 for none.

    >>> one = FigureSize(width=1.0, height=1.0, left=0.5, above=0.5, title=0.0)
    >>> figure, boxes = flow([one, one, one], across=2)
    >>> [(round(box.left, 2), round(box.top, 2)) for box in boxes]
    [(0.65, 0.65), (2.45, 0.65), (0.65, 2.45)]
    """
    rows, sizes = _fill(sizes), list(sizes)
    if across is not None:
        rows = [list(range(i, min(i + across, len(sizes)))) for i in range(0, len(sizes), across)]
        lefts = [max(size.left for size in sizes[column::across]) for column in range(len(rows[0]))]
        sizes = [size._replace(left=lefts[i % across]) for i, size in enumerate(sizes)]
    boxes: list[Box] = []
    top = MARGIN + 1.5 * LINE * bool(title)
    for row in rows:
        above = max(sizes[i].above for i in row)
        left = MARGIN
        for i in row:
            boxes.append(Box(left + sizes[i].left, top + above, sizes[i].width, sizes[i].height))
            left += max(map(_outer, sizes[i % across :: across])) if across is not None else _outer(sizes[i])
        top += above + max(sizes[i].height for i in row) + GAP
    right = max(box.left - size.left + _outer(size) for box, size in zip(boxes, sizes, strict=True)) - GAP
    wide = max(right, MARGIN + title, NARROWEST * has_bar) + MARGIN
    return Box(0, 0, wide, top - GAP + COLOUR_BAR * has_bar + MARGIN), boxes


def _fill(sizes: Sequence[FigureSize]) -> list[list[int]]:
    """The panels of each row: one row if it fits a screen, else a figure of about 3 to 2."""
    if sum(map(_outer, sizes)) <= WIDEST_ROW:
        return [list(range(len(sizes)))]
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
    return size.left + max(size.width, size.title) + GAP
