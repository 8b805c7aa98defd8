"""The cross-entropy of rows of logits and its gradient: a row is read and written once; needs numba.

torch's operations go through the logits a dozen times. Here a row stays in the caches of one thread, in float32, from
its largest number to its gradient.
"""

import inspect
from math import e, log, log2
from typing import Any
from zlib import crc32

import numba
import numpy as np
from numba import types
from numba.np.numpy_support import carray

from regard.compiled import loss_work, vector_code
from regard.compiled.loss_work import WORK
from regard.compiled.vector_code import (
    BIAS,
    MANTISSA,
    POWER,
    SMALLEST,
    aligned_numbers,
    compiled_function,
    long_vectors,
    next_of,
    pointers_to,
)

SHARE = 4
"""The rows that a thread takes at a time."""
# Sums may be reordered, so that loops use vector registers. NaN and infinities keep their meaning.
SUMS = {"nsz", "reassoc", "contract"}
ZERO, ONE, LOG2_E, LEAST = (np.float32(one) for one in (0.0, 1.0, log2(e), SMALLEST - 1))
P0, P1, P2, P3, P4, P5, P6 = (np.float32(one) for one in POWER)
WHOLE = np.float32(1.5 * 2**MANTISSA + BIAS)
"""What is added to x so that it is rounded: the last bits of the sum are those of a whole number, x + BIAS."""
EXPONENT, SIXTEEN, LAST, ROUND = (np.uint32(one) for one in (MANTISSA, 16, 1, 0x7FFF))
SIGN, MAGNITUDE, LOWEST = np.int32(31), np.int32(0x7FFFFFFF), np.int32(-(2**31))

_wholes: Any = pointers_to(types.float32)
_halves: Any = pointers_to(types.uint16)
_indices: Any = pointers_to(types.int64)
_doubles: Any = pointers_to(types.float64)


@numba.njit(nogil=True)
def _read_half(row: Any, numbers: Any) -> None:
    """Write bfloat16 numbers as float32; their bits are the upper half of a float32's."""
    long_vectors()
    for j in range(len(row)):
        numbers[j] = np.uint32(np.uint32(row[j]) << SIXTEEN).view(np.float32)


@numba.njit(nogil=True)
def _in_order(bits: Any) -> Any:
    """The bits of a float32 as a whole number, which is larger for a larger number; and the way back."""
    return np.int32(bits ^ np.int32(np.int32(bits >> SIGN) & MAGNITUDE))


@numba.njit(nogil=True, fastmath=SUMS)
def _top_and_sum(numbers: Any) -> Any:
    """The largest number and the sum.

    LLVM finds the largest whole number with vectors, but not the largest float where there may be NaN.
    """
    long_vectors()
    largest, total = LOWEST, ZERO
    for j in range(len(numbers)):
        number = np.float32(numbers[j])
        largest = max(largest, _in_order(number.view(np.int32)))
        total += number
    return np.int32(_in_order(largest)).view(np.float32), total


@numba.njit(nogil=True, fastmath={"contract"})
def _exp(x: Any) -> Any:
    """e^x for x up to 0, in operations that vectors have: 0 where it is below 2^-126, and NaN for NaN."""
    power = x * LOG2_E
    power = LEAST if power < LEAST else power
    shifted = np.float32(power + WHOLE)
    f = power - (shifted - WHOLE)
    of_fraction = (((((P0 * f + P1) * f + P2) * f + P3) * f + P4) * f + P5) * f + P6
    return of_fraction * np.uint32(shifted.view(np.uint32) << EXPONENT).view(np.float32)


@numba.njit(nogil=True, fastmath=SUMS)
def _exponentials(numbers: Any, top: Any) -> Any:
    """Put e^(x - top) in the place of each x, and give their sum."""
    long_vectors()
    total = ZERO
    for j in range(len(numbers)):
        found = _exp(numbers[j] - top)
        numbers[j] = found
        total += found
    return total


@numba.njit(nogil=True)
def _write_whole(numbers: Any, scale: Any, less: Any) -> None:
    """Put the gradient in the place of the exponentials, but for what the target takes away."""
    long_vectors()
    for j in range(len(numbers)):
        numbers[j] = numbers[j] * scale - less


@numba.njit(nogil=True)
def _write_half(numbers: Any, scale: Any, less: Any, row: Any) -> None:
    """Write the same as bfloat16."""
    long_vectors()
    for j in range(len(row)):
        row[j] = _rounded(numbers[j] * scale - less)


@numba.njit(nogil=True)
def _rounded(number: Any) -> Any:
    """float32 as bfloat16, of two equally near ones the even one. NaN stays NaN, as it came from a bfloat16."""
    bits = np.float32(number).view(np.uint32)
    nearest = np.uint32(np.uint32(bits + ROUND) + np.uint32(np.uint32(bits >> SIXTEEN) & LAST)) >> SIXTEEN
    return np.uint16(nearest)


@numba.njit(nogil=True)
def _loss(work: Any, row: int, target: int, numbers: Any) -> Any:
    """Write the loss of a row, make its numbers e^(z - top), and give what they are to be multiplied with."""
    smoothing = work.smoothing
    top, total = _top_and_sum(numbers)
    loss = np.float64(top) - (1.0 - smoothing) * numbers[target]
    if smoothing > 0:  # otherwise a logit of -inf has no part in the loss, which 0 times it would have
        loss -= smoothing * (total / work.columns)
    weights = _exponentials(numbers, top)
    carray(_doubles(work.losses), work.rows)[row] = loss + log(np.float64(weights))
    return ONE / weights


@numba.njit(nogil=True)
def _row(work: Any, row: int, scratch: Any) -> None:
    """The loss of a row, and its gradient if it is wanted."""
    columns, first = work.columns, row * work.columns
    less, of_target = np.float32(work.smoothing / columns), np.float32(work.smoothing - 1.0)
    target = carray(_indices(work.targets), work.rows)[row]
    if work.is_half:
        half = carray(_halves(work.logits + 2 * first), columns)
        _read_half(half, scratch)
        scale = _loss(work, row, target, scratch)
        if work.wanted:
            _write_half(scratch, scale, less, half)
            half[target] = _rounded(scratch[target] * scale - less + of_target)
    else:
        whole = carray(_wholes(work.logits + 4 * first), columns)
        scale = _loss(work, row, target, whole)
        if work.wanted:
            _write_whole(whole, scale, less)
            whole[target] += of_target


def _compiled(version: int) -> Any:
    """The function that threads call; it closes over the version of other files, so that numba keeps no older code."""

    @compiled_function(types.void(types.CPointer(numba.from_dtype(WORK))))
    def run(pointer: Any) -> None:
        """Take shares until none is left; threads that call it at once share them."""
        _ = version
        work = carray(pointer, 1)[0]
        scratch = aligned_numbers(work.columns)
        first = SHARE * next_of(work.counter)
        while first < work.rows:
            for row in range(first, min(first + SHARE, work.rows)):
                _row(work, row, scratch)
            first = SHARE * next_of(work.counter)

    return run


run = _compiled(crc32("".join(map(inspect.getsource, (vector_code, loss_work))).encode()))
