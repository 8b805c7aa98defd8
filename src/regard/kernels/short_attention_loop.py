"""Attention over short sequences, one head of one sequence at a time; needs numba.

A batch of sentences is thousands of small problems. torch's kernel is made for long ones, and its overhead exceeds the
time of its products. Here the data of one head of one sequence is read once, stays in the cache of one core in float32,
and is written once in the dtype of the tensors.

Scores are stored as (keys, queries), with a query in each lane of a vector, so a maximum or a sum over keys stays
within lanes.
"""

import inspect
from typing import Any
from zlib import crc32

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from regard.kernels import short_attention_work
from regard.kernels.short_attention_work import FORWARD, WORK
from regard.tensors import vector_code
from regard.tensors.vector_code import (
    INT,
    LANES,
    VECTORS,
    VectorCode,
    aligned_numbers,
    compiled_function,
    next_of,
    pointers_to,
    transpose,
)

SHARE = 4
"""The heads a thread takes at a time."""
FEW, MANY = (4, 8) if VECTORS > 1 else (4, 4)
"""The rows multiplied together: MANY with one or two vectors of columns, FEW with more, as registers allow."""
LOWEST = -87.0
"""Scores so far below the largest have a weight of 0: the exponential is no normal float32."""
ZERO, ONE = np.float32(0), np.float32(1)

_floats: Any = pointers_to(types.float32)


def _copying(from_half: bool, to_half: bool) -> Any:
    """Copy LANES elements, times a factor, from one address to another; bfloat16 on one side if wanted."""

    def copy(_typing: Any, _source: Any, _target: Any, _factor: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            code, (source, target, factor) = VectorCode(builder), arguments
            numbers = code.load_half(source) if from_half else code.load(source)
            numbers = builder.fmul(numbers, code.splat(factor))
            (code.store_half if to_half else code.store)(numbers, target)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.float32), generate

    return intrinsic(copy)


def _multiplying(rows: int, vectors: int) -> Any:
    """Emit the products of so many rows with so many vectors of columns of a matrix."""

    def multiply(
        _typing: Any, _rows: Any, _row_stride: Any, _stride: Any, _panel: Any, _panel_stride: Any, _depth: Any,
        _target: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            code, (at, row_stride, stride, panel, width, depth, target) = VectorCode(builder), arguments
            found = code.products(
                at, row_stride, panel, depth, rows, stride=stride, panel_stride=width, vectors=vectors
            )
            for row, line in enumerate(found):
                start = code.at(target, builder.mul(width, code.long(row)))
                for vector, sums in enumerate(line):
                    code.store(sums, code.at(start, vector * LANES))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return intrinsic(multiply)


class _Queries:
    """The code for the scores of LANES queries, key by key."""

    def __init__(self, code: VectorCode, scores: Any, stride: Any, added: Any, first: Any) -> None:
        self.code, self._scores, self._stride, self._added = code, scores, stride, added
        places = ir.Constant(ir.VectorType(INT, LANES), list(range(LANES)))
        self._last = code.builder.add(places, code.splat(code.builder.trunc(first, INT)))

    def address(self, key: Any, matrix: Any = None) -> Any:
        """The address of the scores for a key, or of another matrix of that shape."""
        start = self._scores if matrix is None else matrix
        return self.code.at(start, self.code.builder.mul(key, self._stride))

    def score(self, key: Any) -> Any:
        """The scores for a key, with additions; -inf where a query does not see the key."""
        code, builder = self.code, self.code.builder
        score = builder.fadd(code.load(self.address(key)), code.one(code.at(self._added, key)))
        seen = builder.icmp_signed(">=", self._last, code.splat(builder.trunc(key, INT)))
        return builder.select(seen, score, code.floats(-np.inf))

    def weight(self, exponent: Any) -> Any:
        code, builder = self.code, self.code.builder
        is_nothing = builder.fcmp_ordered("<", exponent, code.floats(LOWEST))
        return builder.select(is_nothing, code.floats(0.0), code.exp(exponent))


def _softmax(
    _typing: Any, _scores: Any, _stride: Any, _keys: Any, _added: Any, _first: Any, _factors: Any, _lse: Any
) -> Any:
    """Exponentials of the scores of LANES queries; writes 1 / their sums, and the log-sum-exps."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        code, (scores, stride, keys, added, first, factors, lse) = VectorCode(builder), arguments
        queries = _Queries(code, scores, stride, added, first)
        zeros, lowest = code.floats(0.0), code.floats(-np.inf)

        def largest(key: Any, held: Any) -> tuple[Any]:
            score = queries.score(key)
            code.store(score, queries.address(key))
            return (code.larger(held, score),)

        (top,) = code.loop(keys, [lowest], largest)
        # A query without keys has weights of 0: its exponents are -inf - 0.
        top = builder.select(builder.fcmp_ordered("==", top, lowest), zeros, top)

        def exponentials(key: Any, held: Any) -> tuple[Any]:
            weight = queries.weight(builder.fsub(code.load(queries.address(key)), top))
            code.store(weight, queries.address(key))
            return (builder.fadd(held, weight),)

        (total,) = code.loop(keys, [zeros], exponentials)
        is_blind = builder.fcmp_ordered("==", total, zeros)
        code.store(builder.select(is_blind, zeros, builder.fdiv(code.floats(1.0), total)), factors)
        code.store(builder.select(is_blind, lowest, builder.fadd(top, code.log(total))), lse)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def _score_gradients(
    _typing: Any, _scores: Any, _grads: Any, _stride: Any, _keys: Any, _added: Any, _first: Any, _lse: Any
) -> Any:
    """Weights P from the scores of LANES queries, and P (dP - sum of P dP) from the gradients dP of the weights."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        code, (scores, grads, stride, keys, added, first, lse) = VectorCode(builder), arguments
        queries, sums, lowest = _Queries(code, scores, stride, added, first), code.load(lse), code.floats(-np.inf)
        # A query without keys, or with all scores -inf, has weights of 0.
        sums = builder.select(builder.fcmp_ordered("==", sums, lowest), code.floats(np.inf), sums)

        def weights(key: Any, held: Any) -> tuple[Any]:
            weight = queries.weight(builder.fsub(queries.score(key), sums))
            code.store(weight, queries.address(key))
            return (code.call("fmuladd", weight, code.load(queries.address(key, grads)), held),)

        (delta,) = code.loop(keys, [code.floats(0.0)], weights)

        def gradients(key: Any) -> tuple[()]:
            grad = builder.fsub(code.load(queries.address(key, grads)), delta)
            grad = builder.fmul(code.load(queries.address(key)), grad)
            code.store(grad, queries.address(key, grads))
            return ()

        code.loop(keys, [], gradients)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


_from_whole, _from_half, _to_half = _copying(False, False), _copying(True, False), _copying(False, True)
_one, _two = _multiplying(MANY, 1), _multiplying(MANY, min(2, VECTORS))
_three, _four = _multiplying(FEW, min(3, VECTORS)), _multiplying(FEW, min(4, VECTORS))
_softmax_of: Any = intrinsic(_softmax)
_score_gradients_of: Any = intrinsic(_score_gradients)


@numba.njit(nogil=True)
def _multiply(
    count: int, columns: int, rows: int, row_stride: int, stride: int, panel: int, depth: int, target: int
) -> None:
    """Write rows @ panel; the panel and the target are as wide as the columns, a multiple of LANES.

    The rows may be the columns of a matrix: `stride` separates the elements of a row.
    """
    column = 0
    while column < columns:
        vectors = min(VECTORS, (columns - column) // LANES)
        at, to = panel + 4 * column, target + 4 * column
        for row in range(0, count, MANY if vectors <= 2 else FEW):
            here, there = rows + 4 * row * row_stride, to + 4 * row * columns
            if vectors == 1:
                _one(here, row_stride, stride, at, columns, depth, there)
            elif vectors == 2:
                _two(here, row_stride, stride, at, columns, depth, there)
            elif vectors == 3:
                _three(here, row_stride, stride, at, columns, depth, there)
            else:
                _four(here, row_stride, stride, at, columns, depth, there)
        column += vectors * LANES


@numba.njit(nogil=True)
def _read(is_half: int, source: int, stride: int, count: int, width: int, factor: Any, target: int) -> None:
    if is_half:
        for row in range(count):
            for column in range(0, width, LANES):
                _from_half(source + 2 * (row * stride + column), target + 4 * (row * width + column), factor)
    else:
        for row in range(count):
            for column in range(0, width, LANES):
                _from_whole(source + 4 * (row * stride + column), target + 4 * (row * width + column), factor)


@numba.njit(nogil=True)
def _write(is_half: int, source: int, count: int, width: int, factor: Any, target: int, stride: int) -> None:
    if is_half:
        for row in range(count):
            for column in range(0, width, LANES):
                _to_half(source + 4 * (row * width + column), target + 2 * (row * stride + column), factor)
    else:
        for row in range(count):
            for column in range(0, width, LANES):
                _from_whole(source + 4 * (row * width + column), target + 4 * (row * stride + column), factor)


@numba.njit(nogil=True)
def _turn(rows: int, width: int, padded: int, target: int) -> None:
    for row in range(0, padded, LANES):
        for column in range(0, width, LANES):
            transpose(rows + 4 * (row * width + column), width, target + 4 * (column * padded + row), padded)


@numba.njit(nogil=True)
def _read_added(work: Any, b: int, h: int, target: int) -> None:
    source = work.added + 4 * (b * work.added_batch + h * work.added_head)
    numbers, added = carray(_floats(source), work.keys), carray(_floats(target), work.keys)
    for j in range(work.keys):
        added[j] = numbers[j]


@numba.njit(nogil=True)
def _last_key(work: Any, query: int) -> int:
    """The last visible key of a query; each later query sees at least one more, if there is one."""
    return query if work.is_causal else query + work.keys


@numba.njit(nogil=True)
def _sizes(work: Any) -> Any:
    """The elements of each piece of scratch memory, in whole vectors.

    They are query, columns, key, value, gradient of the output, scores, their gradients; then the additions to the
    scores of each key, and for each query the log-sum-exp and the factor of its output.
    """
    queries, keys = (work.queries + LANES - 1) // LANES * LANES, (work.keys + LANES - 1) // LANES * LANES
    tall, wide, scores = queries * work.width, keys * work.width, queries * keys
    return tall, tall, wide, wide, tall, scores, scores, keys, queries, queries


@numba.njit(nogil=True)
def _addresses(sizes: Any, start: int) -> Any:
    one = start
    two = one + 4 * sizes[0]
    three = two + 4 * sizes[1]
    four = three + 4 * sizes[2]
    five = four + 4 * sizes[3]
    six = five + 4 * sizes[4]
    seven = six + 4 * sizes[5]
    eight = seven + 4 * sizes[6]
    nine = eight + 4 * sizes[7]
    return one, two, three, four, five, six, seven, eight, nine, nine + 4 * sizes[8]


@numba.njit(nogil=True)
def _forward(work: Any, b: int, h: int, memory: Any) -> None:
    query, columns, key, value, _, scores, _, added, sums, factors = memory
    queries, keys, width, half = work.queries, work.keys, work.width, work.is_half
    padded, size = (queries + LANES - 1) // LANES * LANES, 2 if half else 4
    at = work.query + size * (b * work.query_batch + h * work.query_head)
    _read(half, at, work.query_row, queries, width, work.scale, query)
    at = work.key + size * (b * work.key_batch + h * work.key_head)
    _read(half, at, work.key_row, keys, width, ONE, key)
    at = work.value + size * (b * work.value_batch + h * work.value_head)
    _read(half, at, work.value_row, keys, width, ONE, value)
    if work.added:
        _read_added(work, b, h, added)
    _turn(query, width, padded, columns)
    _multiply(keys, padded, key, width, 1, columns, width, scores)
    for first in range(0, queries, LANES):
        last, here = _last_key(work, first), 4 * first
        _softmax_of(scores + here, padded, keys, added, last, factors + here, sums + here)
    # The query is dead now: its memory takes the output.
    _multiply(queries, width, scores, 1, padded, value, keys, query)
    at = work.output + size * (b * work.output_batch + h * work.output_head)
    factor, found = carray(_floats(factors), queries), carray(_floats(sums), queries)
    lse = carray(_floats(work.lse + 4 * (b * work.lse_batch + h * work.lse_head)), queries)
    for row in range(queries):
        there = at + size * row * work.output_row
        _write(half, query + 4 * row * width, 1, width, factor[row], there, work.output_row)
        lse[row] = found[row]


@numba.njit(nogil=True)
def _backward(work: Any, b: int, h: int, memory: Any) -> None:
    query, columns, key, value, grad, scores, grads, added, sums, _ = memory
    queries, keys, width, half = work.queries, work.keys, work.width, work.is_half
    padded, size = (queries + LANES - 1) // LANES * LANES, 2 if half else 4
    at = work.query + size * (b * work.query_batch + h * work.query_head)
    _read(half, at, work.query_row, queries, width, work.scale, query)
    at = work.key + size * (b * work.key_batch + h * work.key_head)
    _read(half, at, work.key_row, keys, width, ONE, key)
    at = work.value + size * (b * work.value_batch + h * work.value_head)
    _read(half, at, work.value_row, keys, width, ONE, value)
    at = work.grad + size * (b * work.grad_batch + h * work.grad_head)
    _read(half, at, work.grad_row, queries, width, ONE, grad)
    if work.added:
        _read_added(work, b, h, added)
    found = carray(_floats(sums), queries)
    lse = carray(_floats(work.lse + 4 * (b * work.lse_batch + h * work.lse_head)), queries)
    for row in range(queries):
        found[row] = lse[row]
    _turn(query, width, padded, columns)
    _multiply(keys, padded, key, width, 1, columns, width, scores)
    _turn(grad, width, padded, columns)
    _multiply(keys, padded, value, width, 1, columns, width, grads)
    for first in range(0, queries, LANES):
        last, here = _last_key(work, first), 4 * first
        _score_gradients_of(scores + here, grads + here, padded, keys, added, last, sums + here)
    # The columns and the value are dead now: their memory takes the gradients.
    _multiply(queries, width, grads, 1, padded, key, keys, columns)
    at = work.grad_query + size * (b * work.grad_query_batch + h * work.grad_query_head)
    _write(half, columns, queries, width, work.scale, at, work.grad_query_row)
    _multiply(keys, width, grads, padded, 1, query, queries, value)
    at = work.grad_key + size * (b * work.grad_key_batch + h * work.grad_key_head)
    _write(half, value, keys, width, ONE, at, work.grad_key_row)
    _multiply(keys, width, scores, padded, 1, grad, queries, value)
    at = work.grad_value + size * (b * work.grad_value_batch + h * work.grad_value_head)
    _write(half, value, keys, width, ONE, at, work.grad_value_row)


@numba.njit(nogil=True)
def _take_heads(work: Any, sizes: Any, numbers: Any) -> None:
    """Take heads until none is left, in private scratch memory.

    The memory is an argument, so the caller holds it: numba frees an array after the last line that names it, even if
    its address is still in use.
    """
    memory = _addresses(sizes, numbers.ctypes.data)
    every = work.batch * work.heads
    first = SHARE * next_of(work.counter)
    while first < every:
        for item in range(first, min(first + SHARE, every)):
            if work.kind == FORWARD:
                _forward(work, item // work.heads, item % work.heads, memory)
            else:
                _backward(work, item // work.heads, item % work.heads, memory)
        first = SHARE * next_of(work.counter)


def _compiled(version: int) -> Any:
    """The function for threads. Its closure has the version of other files, so numba does not reuse older code."""
    kind = types.void(types.CPointer(numba.from_dtype(WORK)))

    @compiled_function(kind)
    def attend(pointer: Any) -> None:
        """Take heads until none is left; concurrent threads share them."""
        _ = version
        work = carray(pointer, 1)[0]
        sizes = _sizes(work)
        count = 0
        for size in sizes:
            count += size
        numbers = aligned_numbers(count)
        # Padding is multiplied too, and subnormal values would be slow.
        numbers[:] = ZERO
        _take_heads(work, sizes, numbers)

    return attend


attend = _compiled(crc32("".join(map(inspect.getsource, (vector_code, short_attention_work))).encode()))
"""Attention of a batch of short sequences, or its gradients, as the record says."""
