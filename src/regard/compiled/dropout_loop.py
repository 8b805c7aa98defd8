"""Dropout in one pass: the random bits of a number come from its place, and stay in registers; needs numba.

torch's operations read and write a tensor of random bits, one of decisions, and each product of the two. Here a number
is read once and written once, and the way back makes the same bits again, so that nothing is kept for it.
"""

import inspect
from typing import Any
from zlib import crc32

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from regard.compiled import dropout_work, vector_code
from regard.compiled.dropout_work import MASKED, OF_RELU, RELU, WORK
from regard.compiled.vector_code import compiled_function, next_of, pointers_to

SHARE = 1 << 14
"""The numbers that a thread takes at a time: what it reads and writes stays in its caches."""
PART = 1 << 8
"""The numbers that are widened to float32 together."""
STEP, FIRST, SECOND, THIRD = (np.uint32(one) for one in (0x9E3779B1, 0xED5AD4BB, 0xAC4C1B51, 0x31848BAB))
SEVENTEEN, ELEVEN, FIFTEEN, FOURTEEN = (np.uint32(one) for one in (17, 11, 15, 14))
SIXTEEN, ONE = np.uint32(16), np.uint32(1)
ROUND, NOT_A_NUMBER = np.uint32(0x7FFF), np.uint32(0x7FC0)
ZERO = np.float32(0)

_work_numbers: Any = pointers_to(types.float32)
_words: Any = pointers_to(types.uint32)
_halves: Any = pointers_to(types.uint16)


def _as_bits(_typing: Any, _number: Any) -> Any:
    """The bits of a float32, as they are."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return types.uint32(types.float32), generate


def _as_number(_typing: Any, _bits: Any) -> Any:
    """The float32 that has these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return types.float32(types.uint32), generate


_bits_of: Any = intrinsic(_as_bits)
_number_of: Any = intrinsic(_as_number)


@numba.njit(nogil=True)
def _factors(first: int, count: int, work: Any, factors: Any) -> None:
    """The scale where a number is kept, else 0, for numbers from `first` on.

    The bits are a hash of the place, to which one key is added before its bits are mixed once, and the other after.
    Source of the hash: Wellons 2018, "Prospecting for hash functions" (triple32).
    """
    key, second, least, scale = work.key, work.second_key, work.least, work.scale
    for i in range(count):
        # numba makes 64 bits of each answer; only the lower 32 are meant.
        bits = np.uint32(np.uint32(first + i) * STEP + key)
        bits = np.uint32((bits ^ (bits >> SIXTEEN)) + second)
        bits = np.uint32((bits ^ (bits >> SEVENTEEN)) * FIRST)
        bits = np.uint32((bits ^ (bits >> ELEVEN)) * SECOND)
        bits = np.uint32((bits ^ (bits >> FIFTEEN)) * THIRD)
        factors[i] = scale if np.uint32(bits ^ (bits >> FOURTEEN)) >= least else ZERO


@numba.njit(nogil=True)
def _read(address: int, is_half: int, first: int, count: int, numbers: Any) -> None:
    """Numbers as float32."""
    if is_half:
        halves = carray(_halves(address + 2 * first), count)
        for i in range(count):
            numbers[i] = _number_of(np.uint32(halves[i]) << SIXTEEN)
    else:
        whole = carray(_work_numbers(address + 4 * first), count)
        for i in range(count):
            numbers[i] = whole[i]


@numba.njit(nogil=True)
def _write(address: int, is_half: int, first: int, count: int, numbers: Any) -> None:
    """float32 as they are, or rounded to the nearest bfloat16, of two equally near ones to the even one."""
    if is_half:
        halves = carray(_halves(address + 2 * first), count)
        for i in range(count):
            bits = _bits_of(numbers[i])
            rounded = np.uint32(bits + ROUND + ((bits >> SIXTEEN) & ONE)) >> SIXTEEN
            halves[i] = np.uint16(rounded if numbers[i] == numbers[i] else NOT_A_NUMBER)
    else:
        whole = carray(_work_numbers(address + 4 * first), count)
        for i in range(count):
            whole[i] = numbers[i]


@numba.njit(nogil=True)
def _work_on(work: Any, first: int, count: int, x: Any, y: Any, factors: Any) -> None:
    """Up to PART numbers."""
    _read(work.y, work.y_half, first, count, y)
    if work.kind == OF_RELU:
        _read(work.x, work.x_half, first, count, x)
        for i in range(count):
            y[i] = ZERO if x[i] <= ZERO else y[i] * work.scale
    else:
        _factors(first, count, work, factors)
        if work.kind == MASKED:
            for i in range(count):
                y[i] *= factors[i]
        elif work.kind == RELU:
            for i in range(count):
                y[i] = (ZERO if y[i] < ZERO else y[i]) * factors[i]
        else:
            _read(work.x, work.x_half, first, count, x)
            for i in range(count):
                y[i] = x[i] + y[i] * factors[i]
    _write(work.answer, work.answer_half, first, count, y)


def _compiled(version: int) -> Any:
    """The function that threads call; it closes over the version of other files, so that numba keeps no older code."""
    kind = types.void(types.CPointer(numba.from_dtype(WORK)))

    @compiled_function(kind)
    def drop(pointer: Any) -> None:
        """Take shares until none is left; threads that call it at once share them."""
        _ = version
        work = carray(pointer, 1)[0]
        x, y, factors = np.empty(PART, np.float32), np.empty(PART, np.float32), np.empty(PART, np.float32)
        first = SHARE * next_of(work.counter)
        while first < work.count:
            stop = min(first + SHARE, work.count)
            while first < stop:
                count = min(PART, stop - first)
                _work_on(work, first, count, x, y, factors)
                first += count
            first = SHARE * next_of(work.counter)

    return drop


drop = _compiled(crc32("".join(map(inspect.getsource, (vector_code, dropout_work))).encode()))
