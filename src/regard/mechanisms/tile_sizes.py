"""How much is computed at once: the arithmetic of tiles, shared by all that cut a T x S map into pieces.

A tile is some rows (queries) of some cells (heads of sequences), over the keys that they see. Each caller says how
many numbers its tile may hold, since the best number differs: a matrix product, a sort and a mask have other caches.
"""

from collections.abc import Iterator


def fitting(budget: int, size: int, most: int | None = None) -> int:
    """How many things of `size` numbers each fit into `budget` numbers: at least 1, and at most `most`.

    >>> fitting(100, 30), fitting(100, 30, 2), fitting(100, 300)
    (3, 2, 1)
    """
    count = budget // max(1, size)
    return max(1, count if most is None else min(most, count))


def tile_shape(cells: int, rows: int, row_size: int, *, budget: int, few_rows: int) -> tuple[int, int]:
    """How many cells, and how many of their rows, make one tile of at most `budget` numbers, if a single row fits.

    A tile has up to `few_rows` rows before it has a second cell, since narrow matrix products are slow.

    Args:
        cells: how many there are.
        rows: how many each cell has.
        row_size: the numbers that one row of one cell takes.
        budget: the numbers that a tile may hold.
        few_rows: the rows that a tile has before it has more cells.

    >>> tile_shape(12, 512, 512, budget=1 << 16, few_rows=64)
    (2, 64)
    >>> tile_shape(2, 512, 64, budget=1 << 16, few_rows=64)
    (2, 64)
    """
    rows = fitting(budget, row_size, min(rows, few_rows))
    return fitting(budget, max(1, row_size) * rows, cells), rows


def ranges(length: int, step: int) -> Iterator[range]:
    """The numbers from 0 to `length` in ranges of `step`, of which the last may be shorter.

    >>> list(ranges(5, 2))
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    for start in range(0, length, step):
        yield range(start, min(start + step, length))
