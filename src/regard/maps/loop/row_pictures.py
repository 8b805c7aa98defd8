"""The blocks of a picture, from the sums and the maxima of the rows of a bin; needs numba.

The elements of a block lie in one vector, where a sum takes one step for each. Vectors of sixteen blocks combine the
even and the odd elements of two vectors instead, until each lane of one vector holds a block: the blocks stay in their
order.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.maps.loop.row_inputs import FAST, ZERO
from regard.tensors.vector_code import LANES, VectorCode

WIDTHS = (1, 2, 4, 8, 16, 32)


def _combined(code: VectorCode, numbers: Any, width: int, combine: Callable[[Any, Any], Any]) -> Any:
    found = [code.load(code.at(numbers, vector * LANES)) for vector in range(width)]
    while len(found) > 1:
        found = [combine(*code.evens_and_odds(*pair)) for pair in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def _pooling(is_sum: bool) -> Any:
    def pool(_typing: Any, _numbers: Any, _width: Any, _count: Any, _share: Any, _picture: Any) -> Any:
        """Return the count of pooled blocks, a whole number of vectors of them, or 0 for another width than WIDTHS.
        Addresses are of (count * width,) elements, and of (count,), the sums, multiplied by a share, or the maxima so
        far."""

        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            code, (numbers, width, count, share, picture) = VectorCode(builder), arguments
            combine = builder.fadd if is_sum else code.larger
            vectors, done = builder.sdiv(count, code.long(LANES)), cgutils.alloca_once_value(builder, code.long(0))
            has_any = builder.icmp_signed(">", vectors, code.long(0))
            for size in WIDTHS:

                def body(place: Any, size: int = size) -> tuple[()]:
                    at = code.at(numbers, builder.mul(place, code.long(size * LANES)))
                    found = _combined(code, at, size, combine)
                    found = builder.fmul(found, code.splat(share)) if is_sum else found
                    code.update(code.at(picture, builder.mul(place, code.long(LANES))), combine, found)
                    return ()

                is_size = builder.icmp_signed("==", width, code.long(size))
                with builder.if_then(builder.and_(is_size, has_any)):
                    code.loop(vectors, [], body)
                    builder.store(count, done)
            return builder.load(done)

        return types.int64(types.int64, types.int64, types.int64, types.float32, types.int64), generate

    return intrinsic(pool)


sum_blocks, max_blocks = _pooling(True), _pooling(False)


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
