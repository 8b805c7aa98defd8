"""One loop over the scores of a row that finds everything the usual statistics want of its weights; needs numba.

The tiles of `regard.maps.tiles` are read once for each statistic, from memory that is larger than the cache. Here a row
of scores is turned into weights, summed, pooled and ranked while it is in the cache.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

F32, I32 = np.float32, np.int32
# The polynomial of degree 6 that is nearest to 2^f for f in [-1/2, 1/2]: 2e-9 of itself, and 1e-7 by rounding.
P6, P5, P4 = F32(1.5353359e-4), F32(1.3398875e-3), F32(9.618437e-3)
P3, P2, P1 = F32(5.5503324e-2), F32(2.4022648e-1), F32(6.931472e-1)
ZERO, HALF, ONE = F32(0), F32(0.5), F32(1)
SMALLEST, LARGEST = F32(-126), F32(127)
"""The exponents between which 2^x is a normal float32; below them a weight is 0."""
LN_2 = F32(0.6931471805599453)
BIAS, MANTISSA = I32(127), I32(23)
"""The bias of the exponent of a float32, and the bits that stand below it."""
LANES, DEPTH = 16, 16
"""So many weights go into one vector register, and so many rows of them make the sets whose maxima are compared."""
KEY_BITS, LAST_KEY = 32, 2**32 - 1
"""A weight's bits and its key in one number: of equal weights the first key makes the larger number."""
# Sums may be reordered, so that the loops use vector registers. Numbers are finite: `regard.maps.one_loop` looks first.
FAST = {"nnan", "ninf", "nsz", "reassoc", "contract", "arcp"}


def _bitcast(_typing: Any, _bits: Any) -> Any:
    """The float32 that has the bits of an int32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return numba.types.float32(numba.types.int32), generate


_float_of_bits: Any = intrinsic(_bitcast)


@numba.njit(fastmath=FAST, nogil=True, cache=True, inline="always")
def _weigh(row: Any, state: Any, total: Any, peak: Any) -> Any:
    """Turn scores into weights 2^(score - state), add them to the totals, and return the entropy in nats."""
    spread = ZERO
    for j in range(row.size):
        x = row[j] - state
        low = max(min(x, LARGEST), SMALLEST)
        whole = np.floor(low + HALF)
        f = low - whole
        power = (((((P6 * f + P5) * f + P4) * f + P3) * f + P2) * f + P1) * f + ONE
        weight = power * _float_of_bits((I32(whole) + BIAS) << MANTISSA)
        weight = weight if x > SMALLEST else ZERO
        row[j] = weight
        total[j] += weight
        peak[j] = max(peak[j], weight)
        spread += weight * low
    return -spread * LN_2


@numba.njit(nogil=True, cache=True)
def _rank(bits: Any, top: Any, keys: Any, first_key: int, maxima: Any, best: Any) -> None:
    """Write the k largest weights of a row in order, the first of equal ones first.

    Weights are compared by their bits, which for numbers of 0 and above is the same. Those wanted are in the sets
    whose maxima are not below the k-th largest maximum, and only these sets are looked into.
    """
    sets, last = _maxima(bits, maxima), best.size - 1
    best[:] = 0
    for one in range(sets):
        if maxima[one] > best[last]:
            _insert(maxima[one], best)
    least = max(best[last], 1)
    best[:] = 0
    for one in range(sets):
        if maxima[one] >= least:
            start = one // LANES * LANES * DEPTH + one % LANES
            for j in range(start, min(start + LANES * DEPTH, bits.size), LANES):
                if bits[j] >= least:
                    _insert((np.int64(bits[j]) << KEY_BITS) + (LAST_KEY - j), best)
    for place in range(best.size):
        if best[place]:
            top[place] = _float_of_bits(I32(best[place] >> KEY_BITS))
            keys[place] = first_key + LAST_KEY - (best[place] & LAST_KEY)


@numba.njit(nogil=True, cache=True)
def _maxima(bits: Any, maxima: Any) -> int:
    """The largest of each set of DEPTH numbers, LANES apart; LANES sets lie in one another, for vector registers."""
    first = 0
    for start in range(0, bits.size, LANES * DEPTH):
        best = maxima[first : first + LANES]
        best[:] = 0
        stop = min(start + LANES * DEPTH, bits.size)
        whole = start + (stop - start) // LANES * LANES
        for at in range(start, whole, LANES):
            for lane in range(LANES):
                best[lane] = max(best[lane], bits[at + lane])
        for j in range(whole, stop):
            best[j - whole] = max(best[j - whole], bits[j])
        first += LANES
    return first


@numba.njit(nogil=True, cache=True, inline="always")
def _insert(new: Any, best: Any) -> None:
    """Put a number into its place among the largest, without a branch that a processor would guess wrongly."""
    for place in range(best.size):
        held = best[place]
        best[place] = max(held, new)
        new = min(held, new)


@numba.njit(fastmath=FAST, nogil=True, cache=True)
def _pool(total: Any, peak: Any, columns: int, edges: Any, first_key: int, sums: Any, largest: Any) -> None:
    """Add what some rows of one bin gave to each key to the blocks of the picture."""
    column = np.searchsorted(edges, first_key, side="right") - 1
    j = 0
    while j < columns:
        stop = edges[column + 1] - first_key
        width, count = stop - j, 1
        # Whole blocks of one width are added together.
        while column + count + 1 < edges.size and edges[column + count + 1] - first_key == stop + width * count:
            count += 1
        count = min(count, (columns - j) // width)
        if count == 0:
            width, count = columns - j, 1
        blocks, best = sums[column : column + count], largest[column : column + count]
        # LLVM unrolls the loop over a block whose width it knows.
        if width == 1:
            _add_blocks(total[j:], peak[j:], 1, blocks, best)
        elif width == 2:
            _add_blocks(total[j:], peak[j:], 2, blocks, best)
        elif width == 4:
            _add_blocks(total[j:], peak[j:], 4, blocks, best)
        elif width == 8:
            _add_blocks(total[j:], peak[j:], 8, blocks, best)
        else:
            _add_blocks(total[j:], peak[j:], width, blocks, best)
        j, column = j + width * count, column + count


@numba.njit(fastmath=FAST, nogil=True, cache=True, inline="always")
def _add_blocks(total: Any, peak: Any, width: int, sums: Any, largest: Any) -> None:
    for column in range(sums.size):
        added, best = ZERO, ZERO
        for j in range(column * width, (column + 1) * width):
            added += total[j]
            best = max(best, peak[j])
        sums[column] += added
        largest[column] = max(largest[column], best)


def _read_tile(
    scores: Any,
    state: Any,
    first_row: int,
    first_key: int,
    row_bins: Any,
    edges: Any,
    received: Any,
    entropy: Any,
    top: Any,
    keys: Any,
    pooled_sum: Any,
    pooled_max: Any,
    total: Any,
    peak: Any,
    maxima: Any,
    best: Any,
) -> None:
    """Read the scores of a tile, which are overwritten by its weights.

    Args:
        scores: (cells, t, s), to base 2; a hidden key has a score far below 0.
        state: (cells, T), the log-sum-exp to base 2.
        first_row: the query of the first row.
        first_key: the key of the first column.
        row_bins: (T,), the row of the picture for each query.
        edges: (columns + 1,), where the columns of the picture begin among all keys; empty without a picture.
        received: (cells, S) in float64, to which sums are added.
        entropy: (cells, T).
        top, keys: (cells, T, k), filled with 0 and -1.
        pooled_sum, pooled_max: (cells, rows, columns), to which blocks are added.
        total, peak: (s,), memory for the sum and the maximum of each key over the rows of one bin.
        maxima: memory for the maxima of sets: s / DEPTH + LANES numbers.
        best: memory for k numbers.
    """
    cells, rows, columns = scores.shape
    total[:] = ZERO
    peak[:] = ZERO
    for cell in range(cells):
        for i in range(rows):
            row, query = scores[cell, i], first_row + i
            entropy[cell, query] = _weigh(row, state[cell, query], total, peak)
            if best.size:
                _rank(row.view(np.int32), top[cell, query], keys[cell, query], first_key, maxima, best)
            if i + 1 == rows or row_bins[query + 1] != row_bins[query]:
                for j in range(columns):
                    received[cell, first_key + j] += total[j]
                if edges.size:
                    bin_sums, bin_maxima = pooled_sum[cell, row_bins[query]], pooled_max[cell, row_bins[query]]
                    _pool(total, peak, columns, edges, first_key, bin_sums, bin_maxima)
                total[:] = ZERO
                peak[:] = ZERO


_LINE, _PLANE, _BOX = (numba.float32[::1], numba.float32[:, ::1], numba.float32[:, :, ::1])
_COUNT, _COUNTS, _SUMS = numba.int64, numba.int64[::1], numba.float64[:, ::1]
# One signature: it is compiled once, when this file is first imported, and kept on disk beside it.
read_tile: Any = numba.njit(
    numba.void(
        *(_BOX, _PLANE, _COUNT, _COUNT, _COUNTS, _COUNTS, _SUMS, _PLANE, _BOX, numba.int64[:, :, ::1]),
        *(_BOX, _BOX, _LINE, _LINE, numba.int32[::1], _COUNTS),
    ),
    fastmath=FAST,
    nogil=True,
    cache=True,
)(_read_tile)
