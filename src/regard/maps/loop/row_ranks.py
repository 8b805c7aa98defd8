"""The k largest weights of a row, in order; needs numba.

The largest weights of the lanes give a bound, reached by few weights. These are packed without a branch; the rank of
each is the number of others before it, counted by vectors, sixteen at a time.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from regard.tensors.vector_code import (
    FLOAT,
    FLOATS,
    HAS_COMPRESS,
    INT,
    INTS,
    LANES,
    LONG,
    VectorCode,
    aligned_numbers,
    pointers_to,
)

TINY = np.finfo(np.float32).tiny
FEW = 4 * LANES
"""At most so many weights of a row are compared with one another: never fewer than k."""
KEY_BITS, LAST_KEY = 32, 2**32 - 1
"""A weight's bits and its key in one integer: of equal weights the first key makes the larger one."""

_floats, _ints, _longs = (pointers_to(kind) for kind in (types.float32, types.int32, types.int64))


def _kth_largest(_context: Any, _address: Any, _k: Any) -> Any:
    """The k-th largest of the LANES non-negative elements at an address; 0 if there are fewer."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        code, (address, k) = VectorCode(builder), arguments
        numbers, not_below = code.load(address), code.ints(0)
        nothing = ir.Constant(FLOATS, ir.Undefined)
        for lane in range(LANES):
            one = builder.shuffle_vector(numbers, nothing, code.ints(lane))
            not_below = builder.add(not_below, builder.zext(builder.fcmp_ordered(">=", one, numbers), INTS))
        wanted = code.splat(builder.trunc(k, INT))
        kept = builder.select(builder.icmp_signed(">=", not_below, wanted), numbers, code.floats(0.0))
        kind = ir.FunctionType(FLOAT, [FLOATS])
        largest = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fmax.v{LANES}f32")
        return builder.call(largest, [kept])

    return types.float32(types.int64, types.int64), generate


def _set_of_larger(_context: Any, _address: Any, _bound: Any) -> Any:
    """A bit mask of the LANES elements at an address not below a bound."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        code, (address, bound) = VectorCode(builder), arguments
        are_larger = builder.fcmp_ordered(">=", code.load(address), code.splat(bound))
        return builder.zext(builder.bitcast(are_larger, ir.IntType(LANES)), LONG)

    return types.int64(types.int64, types.float32), generate


def _first_bit(_context: Any, _bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


def _compress(_context: Any, _address: Any, _first: Any, _bound: Any, _numbers: Any, _places: Any) -> Any:
    """Write the elements, of LANES at an address, not below a bound, and their indices; return their count. It writes
    whole vectors, so there must be room for LANES more. It is one instruction of AVX-512."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        code, (address, first, bound, numbers, places) = VectorCode(builder), arguments
        weights = code.load(address)
        chosen = builder.fcmp_ordered(">=", weights, code.splat(bound))
        own = builder.add(code.splat(builder.trunc(first, INT)), ir.Constant(INTS, list(range(LANES))))
        code.store(code.compressed(weights, chosen), numbers)
        code.store(code.compressed(builder.bitcast(own, FLOATS), chosen), places)
        bits = builder.bitcast(chosen, ir.IntType(LANES))
        return builder.zext(builder.ctpop(bits), LONG)

    return types.int64(types.int64, types.int64, types.float32, types.int64, types.int64), generate


def _count_before(_context: Any, _numbers: Any, _own: Any, _count: Any, _places: Any) -> Any:
    """Write the ranks among `count` values of LANES of them, from index `own` on; equal ones keep their order."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        code, (numbers, own, count, places) = VectorCode(builder), arguments
        mine = code.load(code.at(numbers, own))
        at = builder.add(code.splat(builder.trunc(own, INT)), ir.Constant(INTS, list(range(LANES))))

        def body(other: Any, before: Any) -> list[Any]:
            number = code.one(code.at(numbers, other))
            stands_before = builder.icmp_signed("<", code.splat(builder.trunc(other, INT)), at)
            is_equal = builder.and_(builder.fcmp_ordered("==", number, mine), stands_before)
            comes_before = builder.or_(builder.fcmp_ordered(">", number, mine), is_equal)
            return [builder.sub(before, builder.sext(comes_before, INTS))]

        (found,) = code.loop(count, [code.ints(0)], body)
        code.store(builder.bitcast(found, FLOATS), places)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


def _bitcast(_typing: Any, _bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


_kth: Any = intrinsic(_kth_largest)
_larger: Any = intrinsic(_set_of_larger)
_first: Any = intrinsic(_first_bit)
_before: Any = intrinsic(_count_before)
_float_of_bits: Any = intrinsic(_bitcast)


@numba.njit(nogil=True, inline="always")
def pack_by_bits(address: int, first: int, bound: Any, numbers: int, places: int) -> int:
    """The same as `_compress`, for processors without the instruction."""
    weights, few, at = carray(_floats(address), LANES), carray(_floats(numbers), LANES), carray(_ints(places), LANES)
    found, count = _larger(address, bound), 0
    while found:
        lane = _first(found)
        few[count], at[count] = weights[lane], first + lane
        count += 1
        found &= found - 1
    return count


pack: Any = intrinsic(_compress) if HAS_COMPRESS else pack_by_bits


@numba.njit(nogil=True)
def room_for(width: int) -> Any:
    """An address: passing the array itself would count references, which takes as long as ranking a row."""
    return aligned_numbers(2 * (width + LANES) + 3 * FEW)


@numba.njit(nogil=True)
def rank(weights: int, width: int, top: int, keys: int, ranked: int, first_key: int, maxima: int, room: int) -> None:
    """Write the k largest weights of a row in order, the first of equal ones first.

    `weights` is the address of `width` weights, in whole vectors, the first of which is that of `first_key`. `top` and
    `keys` are the addresses of (k,) elements; if fewer are above 0, the others stay. `maxima` is the address of the
    largest weight of each lane, `room` that of the memory of `room_for`.
    """
    few, places = room, room + 4 * (width + LANES)
    order = places + 4 * (width + LANES)
    bound, count = max(_kth(maxima, ranked), TINY), 0
    for start in range(0, width, LANES):
        count += pack(weights + 4 * start, start, bound, few + 4 * count, places + 4 * count)
    if count == 0:
        return
    if count > FEW:
        _rank_many(few, places, count, top, keys, ranked, first_key, order)
        return
    for own in range(0, count, LANES):
        _before(few, own, count, order + 4 * own)
    # Sort all, then take k: a branch for each would be mispredicted.
    of, where, order_of = carray(_floats(few), count), carray(_ints(places), count), carray(_ints(order), count)
    in_order, where_in_order = carray(_floats(order + 4 * FEW), FEW), carray(_ints(order + 8 * FEW), FEW)
    for i in range(count):
        in_order[order_of[i]], where_in_order[order_of[i]] = of[i], where[i]
    top_of, keys_of = carray(_floats(top), ranked), carray(_longs(keys), ranked)
    for place in range(min(count, ranked)):
        top_of[place], keys_of[place] = in_order[place], first_key + where_in_order[place]


@numba.njit(nogil=True)
def _rank_many(few: int, places: int, count: int, top: int, keys: int, ranked: int, first_key: int, room: int) -> None:
    """The same where many weights reach the bound: insert each one above the smallest so far. Weights are compared by
    their bits, which have the same order for non-negative values."""
    bits, where, best = carray(_ints(few), count), carray(_ints(places), count), carray(_longs(room), ranked)
    top_of, keys_of = carray(_floats(top), ranked), carray(_longs(keys), ranked)
    best[:] = 0
    for i in range(count):
        one = (np.int64(bits[i]) << KEY_BITS) + (LAST_KEY - where[i])
        if one > best[ranked - 1]:
            _insert(one, best)
    for place in range(ranked):
        top_of[place] = _float_of_bits(np.int32(best[place] >> KEY_BITS))
        keys_of[place] = first_key + LAST_KEY - (best[place] & LAST_KEY)


@numba.njit(nogil=True, inline="always")
def _insert(new: Any, best: Any) -> None:
    # From the end, so no step waits for the one before.
    for place in range(best.size - 1, 0, -1):
        best[place] = max(best[place], min(best[place - 1], new))
    best[0] = max(best[0], new)
