"""The blocks of a picture, from the sums and the maxima of the rows of a bin; needs numba."""

from typing import Any

import numba
import numpy as np

from regard.maps.loop.picture_blocks import max_blocks, sum_blocks
from regard.maps.loop.row_numbers import FAST, ZERO
from regard.tensors.vector_code import LANES


@numba.njit(fastmath=FAST, nogil=True)
def pool(
    total: Any,
    peak: Any,
    columns: int,
    edges: Any,
    first_key: int,
    row_share: Any,
    shares: Any,
    sums: Any,
    largest: Any,
) -> None:
    """Add the sums by key of the rows of one bin to its row of the picture, and take the larger of its maxima."""
    column = np.searchsorted(edges, first_key, side="right") - 1
    bins, j = edges.size - 1, 0
    wider = edges[bins] % bins  # This many bins come first and have one key more than the others.
    while j < columns:
        width, count = edges[column + 1] - first_key - j, 1
        # Whole blocks of one width are pooled together.
        if edges[column] - first_key == j:
            count = min((wider if column < wider else bins) - column, (columns - j) // width)
        if count == 0:
            count = 1
        width = min(width, columns - j)  # The last keys may end within a block.
        done, share = count // LANES * LANES, row_share * shares[column]
        if sums.size:
            done = _sum_vectors(total.ctypes.data + 4 * j, width, done, share, sums.ctypes.data + 4 * column)
        if largest.size:
            done = _max_vectors(peak.ctypes.data + 4 * j, width, done, largest.ctypes.data + 4 * column)
        first, last, key = column + done, column + count, j + done * width
        _pool_blocks(total[key:], peak[key:], width, share, sums[first:last], largest[first:last])
        j, column = j + width * count, column + count


@numba.njit(nogil=True)
def _sum_vectors(numbers: int, width: int, count: int, share: Any, picture: int) -> int:
    return sum_blocks(numbers, width, count, share, picture)  # (Apart from `_pool`, whose sums may be reordered.)


@numba.njit(nogil=True)
def _max_vectors(numbers: int, width: int, count: int, picture: int) -> int:
    return max_blocks(numbers, width, count, ZERO, picture)


@numba.njit(fastmath=FAST, nogil=True)
def _pool_blocks(total: Any, peak: Any, width: int, share: Any, sums: Any, largest: Any) -> None:
    # Two loops, because LLVM gives up on one with so many possibly overlapping arrays.
    for column in range(sums.size):
        added = ZERO
        for j in range(column * width, (column + 1) * width):
            added += total[j]
        sums[column] += added * share
    for column in range(largest.size):
        best = ZERO
        for j in range(column * width, (column + 1) * width):
            best = max(best, peak[j])
        largest[column] = max(largest[column], best)
