"""Dropout in one pass: the random bits of an element are a hash of its index and stay in registers; needs numba.

torch's operations read and write a tensor of random bits, one of decisions, and each product of the two. Here an
element is read once and written once, and the backward pass recomputes the bits, so none are stored.
"""

import inspect
from typing import Any
from zlib import crc32

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic, overload
from numba.np.numpy_support import carray

from regard.nn import dropout_work
from regard.nn.dropout_work import MASKED, OF_RELU, RELU, SHARE, WORK
from regard.tensors import vector_code
from regard.tensors.vector_code import compiled_function, long_vectors, next_of, pointers_to

STEP, FIRST, SECOND, THIRD = (
    np.uint32(one) for one in (dropout_work.STEP, dropout_work.FIRST, dropout_work.SECOND, dropout_work.THIRD)
)
SEVENTEEN, ELEVEN, FIFTEEN, FOURTEEN = (np.uint32(one) for one in (17, 11, 15, 14))
SIXTEEN, ONE = np.uint32(16), np.uint32(1)
ROUND, NOT_A_NUMBER = np.uint32(0x7FFF), np.uint32(0x7FC0)
ZERO = np.float32(0)

_floats: Any = pointers_to(types.float32)
_halves: Any = pointers_to(types.uint16)


def _as_bits(_typing: Any, _number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return types.uint32(types.float32), generate


def _as_number(_typing: Any, _bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return types.float32(types.uint32), generate


_bits_of: Any = intrinsic(_as_bits)
_number_of: Any = intrinsic(_as_number)


def _wide(number: Any) -> Any:
    """An array's element as float32; bfloat16 arrays are integer arrays here."""


def _for_array(_array: Any, _number: Any) -> Any:
    """float32 as an array's element, rounded to bfloat16 if needed, ties to even."""


@overload(_wide, strict=False, inline="always")
def _wide_of(number: Any) -> Any:
    if isinstance(number, types.Float):
        return lambda number: number
    return lambda number: _number_of(np.uint32(number) << SIXTEEN)


@overload(_for_array, strict=False, inline="always")
def _for_array_of(_array: Any, _number: Any) -> Any:
    if isinstance(_array.dtype, types.Float):
        return lambda _array, _number: _number

    def rounded(_array: Any, _number: Any) -> Any:
        bits = _bits_of(_number)
        nearest = np.uint32(bits + ROUND + ((bits >> SIXTEEN) & ONE)) >> SIXTEEN
        return np.uint16(nearest if _number == _number else NOT_A_NUMBER)

    return rounded


@numba.njit(nogil=True, inline="always")
def _factor(place: int, key: int, second: int, least: int, scale: float) -> Any:
    """The scale if the element of an index is kept, else 0.

    The bits are a hash of the index, with one key added before the first mixing, and the other after. Source of the
    hash: Wellons 2018, "Prospecting for hash functions" (triple32).
    """
    # numba widens each result to 64 bits; keep the lower 32.
    bits = np.uint32(np.uint32(place) * STEP + key)
    bits = np.uint32((bits ^ (bits >> SIXTEEN)) + second)
    bits = np.uint32((bits ^ (bits >> SEVENTEEN)) * FIRST)
    bits = np.uint32((bits ^ (bits >> ELEVEN)) * SECOND)
    bits = np.uint32((bits ^ (bits >> FIFTEEN)) * THIRD)
    return scale if np.uint32(bits ^ (bits >> FOURTEEN)) >= least else ZERO


@numba.njit(nogil=True)
def _masked(work: Any, first: int, y: Any, answer: Any) -> None:
    long_vectors()
    key, second, least, scale = work.key, work.second_key, work.least, work.scale
    for i in range(len(y)):
        factor = _factor(first + i, key, second, least, scale)
        answer[i] = _for_array(answer, _wide(y[i]) * factor)


@numba.njit(nogil=True)
def _masked_relu(work: Any, first: int, y: Any, answer: Any) -> None:
    long_vectors()
    key, second, least, scale = work.key, work.second_key, work.least, work.scale
    for i in range(len(y)):
        factor = _factor(first + i, key, second, least, scale)
        number = _wide(y[i])
        answer[i] = _for_array(answer, (ZERO if number < ZERO else number) * factor)


@numba.njit(nogil=True)
def _masked_sum(work: Any, first: int, x: Any, y: Any, answer: Any) -> None:
    long_vectors()
    key, second, least, scale = work.key, work.second_key, work.least, work.scale
    for i in range(len(y)):
        factor = _factor(first + i, key, second, least, scale)
        answer[i] = _for_array(answer, _wide(x[i]) + _wide(y[i]) * factor)


@numba.njit(nogil=True)
def _of_relu(work: Any, x: Any, y: Any, answer: Any) -> None:
    long_vectors()
    scale = work.scale
    for i in range(len(y)):
        number = _wide(y[i]) * scale
        answer[i] = _for_array(answer, ZERO if _wide(x[i]) <= ZERO else number)


@numba.njit(nogil=True)
def _whole_at(address: int, first: int, count: int) -> Any:
    return carray(_floats(address + 4 * first), count)


@numba.njit(nogil=True)
def _half_at(address: int, first: int, count: int) -> Any:
    return carray(_halves(address + 2 * first), count)


@numba.njit(nogil=True)
def _work_on(work: Any, first: int, count: int, y: Any, answer: Any) -> None:
    long_vectors()
    if work.kind == MASKED:
        _masked(work, first, y, answer)
    elif work.kind == RELU:
        _masked_relu(work, first, y, answer)
    elif work.kind == OF_RELU:
        if work.x_half:
            _of_relu(work, _half_at(work.x, first, count), y, answer)
        else:
            _of_relu(work, _whole_at(work.x, first, count), y, answer)
    elif work.x_half:
        _masked_sum(work, first, _half_at(work.x, first, count), y, answer)
    else:
        _masked_sum(work, first, _whole_at(work.x, first, count), y, answer)


@numba.njit(nogil=True)
def _share(work: Any, first: int, count: int) -> None:
    long_vectors()
    if work.y_half:
        y = _half_at(work.y, first, count)
        if work.answer_half:
            _work_on(work, first, count, y, _half_at(work.answer, first, count))
        else:
            _work_on(work, first, count, y, _whole_at(work.answer, first, count))
    else:
        wide = _whole_at(work.y, first, count)
        if work.answer_half:
            _work_on(work, first, count, wide, _half_at(work.answer, first, count))
        else:
            _work_on(work, first, count, wide, _whole_at(work.answer, first, count))


def _compiled(version: int) -> Any:
    """The function for threads. Its closure has the version of other files, so numba does not reuse older code."""
    kind = types.void(types.CPointer(numba.from_dtype(WORK)))

    @compiled_function(kind)
    def drop(pointer: Any) -> None:
        """Take shares until none is left; concurrent threads share them."""
        long_vectors()
        _ = version
        work = carray(pointer, 1)[0]
        first = SHARE * next_of(work.counter)
        while first < work.count:
            _share(work, first, min(SHARE, work.count - first))
            first = SHARE * next_of(work.counter)

    return drop


drop = _compiled(crc32("".join(map(inspect.getsource, (vector_code, dropout_work))).encode()))
