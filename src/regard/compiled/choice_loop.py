"""The best continuations of hypotheses, with their log-probabilities, in one pass over the logits; needs numba.

torch's operations write all log-probabilities, read them again for the maxima of chunks, and gather the best chunks.
Here a row is read twice while it is in the cache: for its largest numbers, and for the sum of its exponentials. Most of
it is never looked at again: a number is a candidate only if the largest of those that share its lane is one.
"""

import inspect
from math import log
from typing import Any
from zlib import crc32

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from regard.compiled import choice_work, vector_code
from regard.compiled.choice_work import WORK
from regard.compiled.vector_code import LANES, VectorCode, compiled_function, long_vectors, next_of, pointers_to

DEEP = 16
"""The numbers that share a lane of a block: a block has so many vectors."""
BLOCK = DEEP * LANES
NOTHING = np.float32(-np.inf)


def _lanes_of_largest(_typing: Any, _source: Any, _vectors: Any, _target: Any) -> Any:
    """Write the largest number of each lane of some vectors."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        code, (source, vectors, target) = VectorCode(builder), arguments

        def body(place: Any, largest: Any) -> list[Any]:
            return [code.larger(largest, code.load(code.at(source, builder.mul(place, code.long(LANES)))))]

        (found,) = code.loop(vectors, [code.floats(-np.inf)], body)
        code.store(found, target)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


def _lanes_of_sums(_typing: Any, _source: Any, _vectors: Any, _largest: Any, _target: Any) -> Any:
    """Write the sum of e^(x - largest) of each lane of some vectors."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        code, (source, vectors, largest, target) = VectorCode(builder), arguments
        shift = code.splat(largest)

        def body(place: Any, total: Any) -> list[Any]:
            numbers = code.load(code.at(source, builder.mul(place, code.long(LANES))))
            return [builder.fadd(total, code.exp(builder.fsub(numbers, shift)))]

        (found,) = code.loop(vectors, [code.floats(0.0)], body)
        code.store(found, target)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


_write_largest: Any = intrinsic(_lanes_of_largest)
_write_sums: Any = intrinsic(_lanes_of_sums)
_floats: Any = pointers_to(types.float32)
_longs: Any = pointers_to(types.int64)


@numba.njit(nogil=True)
def _largest_of_row(row: int, columns: int, maxima: Any) -> Any:
    """The largest number of a row; those of the lanes of its blocks are written."""
    vectors = columns // LANES
    for first in range(0, vectors, DEEP):
        lanes = maxima.ctypes.data + 4 * (first // DEEP * LANES)
        _write_largest(row + 4 * first * LANES, min(DEEP, vectors - first), lanes)
    largest, numbers = NOTHING, carray(_floats(row), columns)
    for i in range((vectors + DEEP - 1) // DEEP * LANES):
        if maxima[i] > largest:
            largest = maxima[i]
    for i in range(vectors * LANES, columns):
        if numbers[i] > largest:
            largest = numbers[i]
    return largest


@numba.njit(nogil=True)
def _total_of_row(row: int, columns: int, largest: Any) -> float:
    """The logarithm of the sum of e^(x - largest) over a row."""
    sums, vectors, total = np.zeros(LANES, np.float32), columns // LANES, 0.0
    if vectors:
        _write_sums(row, vectors, largest, sums.ctypes.data)
    for lane in range(LANES):
        total += sums[lane]
    numbers = carray(_floats(row), columns)
    for i in range(vectors * LANES, columns):
        total += np.exp(numbers[i] - largest)
    return log(total)


@numba.njit(nogil=True)
def _offer(values: Any, places: Any, value: Any, place: int) -> None:
    """Put a candidate where it belongs among the best, if it does. Of equal ones the first place is better."""
    at = values.size
    while at > 0 and (value > values[at - 1] or (value == values[at - 1] and place < places[at - 1])):
        if at < values.size:
            values[at], places[at] = values[at - 1], places[at - 1]
        at -= 1
    if at < values.size:
        values[at], places[at] = value, place


@numba.njit(nogil=True)
def choose_in_group(work: Any, group: int, maxima: Any) -> None:
    """The best of one group."""
    long_vectors()
    wanted, columns = work.wanted, work.columns
    values = carray(_floats(work.values + 4 * group * wanted), wanted)
    places = carray(_longs(work.places + 8 * group * wanted), wanted)
    for i in range(wanted):
        values[i], places[i] = NOTHING, i
    for member in range(work.members):
        number = group * work.members + member
        given = carray(_floats(work.offsets + 4 * number), 1)[0]
        if given == NOTHING:
            continue
        row = work.logits + 4 * number * work.row_stride
        largest = _largest_of_row(row, columns, maxima)
        offset = np.float32(given - _total_of_row(row, columns, largest))
        if np.isnan(offset):
            # As the operations of torch have it, NaN is above all numbers.
            for i in range(min(wanted, columns)):
                values[i], places[i] = offset, member * columns + i
            return
        _look_at(carray(_floats(row), columns), maxima, largest, offset, member * columns, values, places)


@numba.njit(nogil=True)
def _look_at(numbers: Any, maxima: Any, largest: Any, offset: Any, first: int, values: Any, places: Any) -> None:
    """Offer the numbers of a row that may be among the best. First the largest is subtracted: huge ones stay exact."""
    worst, vectors = values.size - 1, numbers.size // LANES
    for lane in range((vectors + DEEP - 1) // DEEP * LANES):
        if maxima[lane] - largest + offset >= values[worst]:
            begin = lane // LANES * BLOCK + lane % LANES
            for i in range(begin, min(begin + BLOCK, vectors * LANES), LANES):
                _offer(values, places, numbers[i] - largest + offset, first + i)
    for i in range(vectors * LANES, numbers.size):
        _offer(values, places, numbers[i] - largest + offset, first + i)


@numba.njit(nogil=True)
def room_for_maxima(columns: int) -> Any:
    """Memory for the largest numbers of a row's lanes."""
    return np.empty((columns // BLOCK + 1) * LANES, np.float32)


def _compiled(version: int) -> Any:
    """The function that threads call; it closes over the version of other files, so that numba keeps no older code."""

    @compiled_function(types.void(types.CPointer(numba.from_dtype(WORK))))
    def choose(pointer: Any) -> None:
        """Take groups until none is left; threads that call it at once share them."""
        _ = version
        work = carray(pointer, 1)[0]
        maxima = room_for_maxima(work.columns)
        group = next_of(work.counter)
        while group < work.groups:
            choose_in_group(work, group, maxima)
            group = next_of(work.counter)

    return choose


choose = _compiled(crc32("".join(map(inspect.getsource, (vector_code, choice_work))).encode()))
