"""Sizes of tiles of T x S maps.

A tile has some rows (queries) of some `flat_heads` (heads of sequences), and the keys of these rows. Each caller sets
the budget of elements a tile, because a matrix product, a sort and a mask use caches differently.
"""

from collections.abc import Iterable, Iterator


def fitting(budget: int, size: int, most: int | None = None) -> int:
    """The number of items of `size` elements in `budget` elements: at least 1, and at most `most`.

    >>> fitting(100, 30), fitting(100, 30, 2), fitting(100, 300)
    (3, 2, 1)
    """
    count = budget // max(1, size)
    return max(1, count if most is None else min(most, count))


def tile_shape(flat_heads: int, rows: int, row_size: int, *, budget: int, few_rows: int) -> tuple[int, int]:
    """The number of flat_heads, and of rows in each, of one tile of at most `budget` elements (or a single row).

    A row has `row_size` elements. A tile fills `few_rows` rows before it adds a second flat_head, because narrow matrix
    products are slow.

    >>> tile_shape(12, 512, 512, budget=1 << 16, few_rows=64)
    (2, 64)
    >>> tile_shape(2, 512, 64, budget=1 << 16, few_rows=64)
    (2, 64)
    """
    rows = fitting(budget, row_size, min(rows, few_rows))
    return fitting(budget, max(1, row_size) * rows, flat_heads), rows


def ranges(length: int, step: int) -> Iterator[range]:
    """The integers from 0 to `length` - 1 in ranges of `step`; the last range may be shorter.

    A length of 0 gives one empty range: an empty batch is one tile without flat_heads.

    >>> list(ranges(5, 2)), list(ranges(0, 2))
    ([range(0, 2), range(2, 4), range(4, 5)], [range(0, 0)])
    """
    for start in range(0, max(length, 1), step):
        yield range(start, min(start + step, length))


def union(parts: Iterable[range]) -> range:
    """The smallest range with all the integers of some ranges."""
    found = [part for part in parts if part]
    return range(min(part.start for part in found), max(part.stop for part in found)) if found else range(0)
