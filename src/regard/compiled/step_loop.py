"""The compiled step of a decoder: all that a step computes, in one call; needs numba.

A step of a small model multiplies one vector with each matrix. What takes its time is to read the matrices, and what
stands between them. Here the threads share out each stage, and go on to the next one as soon as all of it is done.
"""

import inspect
from math import erf, pi, sqrt
from typing import Any
from zlib import crc32

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from regard.compiled import choice_loop, choice_work, finishing, step_work, tile_code, vector_code
from regard.compiled.choice_loop import choose_in_group, room_for_maxima
from regard.compiled.finishing import fetch_panel, finish_panel
from regard.compiled.step_work import (
    ATTEND,
    CUT,
    FULL,
    GELU,
    GELU_TANH,
    HALVES,
    NORM,
    PAIRS,
    PRODUCT,
    RELU,
    STAGE,
    TILE_DEPTH,
    TILE_ROWS,
    WORK,
)
from regard.compiled.tile_code import (
    HAS_TILES,
    blocks_of,
    configure_tiles,
    cut_rows,
    multiply_tiles,
    release_tiles,
    row_bytes,
)
from regard.compiled.vector_code import (
    HAS_PAIRS,
    LANES,
    PANEL,
    VectorCode,
    aligned_numbers,
    compiled_function,
    next_of,
    pointers_to,
    value_of,
)

TOGETHER = 5
"""The most rows that are multiplied together: a beam of five. Their sums fill twenty of 32 vector registers."""
GATED = 256
"""The numbers that are gated in one share."""
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
ROOT_HALF, TANH_SCALE, CUBIC = np.float32(sqrt(0.5)), np.float32(-2 * sqrt(2 / pi)), np.float32(0.044715)
# Sums may be reordered, so that loops use vector registers. NaN and infinities keep their meaning.
FAST = {"nsz", "reassoc", "contract", "arcp"}


def _multiply(rows: int, kept: int) -> Any:
    """The product of so many rows with one panel of a matrix, written to an address in rows of PANEL numbers."""

    def multiply(_context: Any, _source: Any, _stride: Any, _panel: Any, _depth: Any, _target: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            code, (source, stride, panel, depth, target) = VectorCode(builder), arguments
            if kept == PAIRS:
                found = code.products_of_pairs(source, stride, panel, depth, rows)
            else:
                found = code.products(source, stride, panel, depth, rows, halves=kept == HALVES)
            for row, line in enumerate(found):
                for vector, sums in enumerate(line):
                    code.store(sums, code.at(target, row * PANEL + vector * LANES))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return intrinsic(multiply)


def _exponential(_typing: Any, _address: Any) -> Any:
    """Put e^x in the place of each of the LANES numbers at an address."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        code, (address,) = VectorCode(builder), arguments
        code.store(code.exp(code.load(address)), address)
        return context.get_dummy_value()

    return types.void(types.int64), generate


_exp_of_lanes: Any = intrinsic(_exponential)
_floats: Any = pointers_to(types.float32)
_longs: Any = pointers_to(types.int64)
_stages: Any = pointers_to(numba.from_dtype(STAGE))
_choices: Any = pointers_to(numba.from_dtype(choice_work.WORK))


def _multiplying(kept: int) -> Any:
    """The products of one to TOGETHER rows with one panel of a matrix."""
    one, two, three, four, five = (_multiply(rows, kept) for rows in range(1, TOGETHER + 1))

    @numba.njit(nogil=True)
    def multiply(rows: int, source: int, stride: int, panel: int, depth: int, target: int) -> None:
        if rows == 1:
            one(source, stride, panel, depth, target)
        elif rows == 2:
            two(source, stride, panel, depth, target)
        elif rows == 3:
            three(source, stride, panel, depth, target)
        elif rows == 4:
            four(source, stride, panel, depth, target)
        else:
            five(source, stride, panel, depth, target)

    return multiply


_multiply_whole, _multiply_half = _multiplying(FULL), _multiplying(HALVES)
_multiply_pairs = _multiplying(PAIRS if HAS_PAIRS else HALVES)


def _round(_typing: Any, _source: Any, _target: Any) -> Any:
    """Write the LANES numbers at an address as bfloat16."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        code, (source, target) = VectorCode(builder), arguments
        write = code.round_to_half if HAS_PAIRS else code.store_half
        write(code.load(source), target)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


_round_lanes: Any = intrinsic(_round)


@numba.njit(nogil=True)
def _rounded(source: int, stride: int, rows: int, inputs: int, halves: Any) -> None:
    """Some rows as bfloat16, with zeros up to a whole vector."""
    whole, last = inputs // LANES * LANES, np.zeros(LANES, np.float32)
    for row in range(rows):
        start = source + 4 * row * stride
        target = halves[row].ctypes.data
        for i in range(0, whole, LANES):
            _round_lanes(start + 4 * i, target + 2 * i)
        if whole < inputs:
            numbers = carray(_floats(start), inputs)
            for i in range(whole, inputs):
                last[i - whole] = numbers[i]
            _round_lanes(last.ctypes.data, target + 2 * whole)


@numba.njit(nogil=True)
def _product(stage: Any, rows: int, panel: int, scratch: Any, halves: Any) -> None:
    """One panel of the columns of a product."""
    together = 2 * TILE_ROWS if stage.parts and rows >= TILE_ROWS else TOGETHER
    for row in range(0, rows, together):
        count = min(rows - row, together)
        fetch_panel(count, stage.target + 4 * (row * stage.target_stride + panel * PANEL), stage.target_stride)
        if together > TOGETHER:
            _multiply_cut(stage, row, count, panel, scratch)
        else:
            _multiply_rows(stage, row, count, panel, scratch, halves)
        _finish(stage, row, count, panel * PANEL, scratch)


@numba.njit(nogil=True)
def _multiply_cut(stage: Any, row: int, count: int, panel: int, scratch: Any) -> None:
    """The products of rows that are cut, as tiles."""
    size = row_bytes(stage.inputs, stage.parts)
    cut, matrix = stage.cut + row * size, stage.tiles + panel * PANEL * size
    multiply_tiles(count, cut, matrix, stage.inputs, stage.parts, scratch.ctypes.data)


@numba.njit(nogil=True)
def _multiply_rows(stage: Any, row: int, count: int, panel: int, scratch: Any, halves: Any) -> None:
    """The products of up to TOGETHER rows, by vectors."""
    source = stage.source + 4 * row * stage.source_stride
    if stage.kept == PAIRS:
        pairs = blocks_of(stage.inputs) * TILE_DEPTH // 2
        _rounded(source, stage.source_stride, count, stage.inputs, halves)
        at, stride = stage.weights + 4 * panel * pairs * PANEL, halves.shape[1] // 2
        _multiply_pairs(count, halves.ctypes.data, stride, at, (stage.inputs + 1) // 2, scratch.ctypes.data)
    elif stage.kept == HALVES:
        at = stage.weights + 2 * panel * stage.inputs * PANEL
        _multiply_half(count, source, stage.source_stride, at, stage.inputs, scratch.ctypes.data)
    else:
        at = stage.weights + 4 * panel * stage.inputs * PANEL
        _multiply_whole(count, source, stage.source_stride, at, stage.inputs, scratch.ctypes.data)


@numba.njit(nogil=True)
def _cut(stage: Any, rows: int, row: int) -> None:
    """Cut the rows of one tile."""
    source = stage.source + 4 * row * stage.source_stride
    target = stage.target + row * row_bytes(stage.inputs, stage.parts)
    cut_rows(source, stage.source_stride, min(rows - row, TILE_ROWS), stage.inputs, stage.parts, target)


@numba.njit(nogil=True)
def _finish(stage: Any, row: int, rows: int, first: int, scratch: Any) -> None:
    """Write the products of some rows, with what is added to them, and after the activation."""
    count = min(PANEL, stage.outputs - first)
    bias = stage.bias + 4 * first if stage.bias else 0
    place = 4 * (row * stage.target_stride + first)
    plus, target = stage.plus + place if stage.plus else 0, stage.target + place
    if count == PANEL and stage.activation <= RELU:
        finish_panel(rows, scratch.ctypes.data, bias, plus, stage.activation, target, stage.target_stride)
        return
    for i in range(rows):
        there = 4 * i * stage.target_stride
        numbers = carray(_floats(target + there), count)
        _finish_some(scratch[i], bias, plus + there if plus else 0, stage.activation, numbers)


@numba.njit(nogil=True)
def _finish_some(found: Any, bias: int, plus: int, activation: int, target: Any) -> None:
    """Write some products of one row."""
    count = target.size
    if bias:
        added = carray(_floats(bias), count)
        for j in range(count):
            found[j] += added[j]
    if plus:
        added = carray(_floats(plus), count)
        for j in range(count):
            found[j] += added[j]
    if activation:
        _activate(activation, found)
    for j in range(count):
        target[j] = found[j]


@numba.njit(nogil=True)
def _exponentials(numbers: Any) -> None:
    """Put e^x in the place of each x; the size is a multiple of LANES."""
    for j in range(0, numbers.size, LANES):
        _exp_of_lanes(numbers.ctypes.data + 4 * j)


@numba.njit(nogil=True)
def _activate(activation: int, numbers: Any) -> None:
    """Apply an activation to PANEL numbers."""
    if activation == RELU:
        for j in range(numbers.size):
            # A comparison with NaN is false, so that NaN stays, as it does in torch.
            numbers[j] = ZERO if numbers[j] < ZERO else numbers[j]
    elif activation == GELU:
        for j in range(numbers.size):
            numbers[j] = HALF * numbers[j] * (ONE + np.float32(erf(numbers[j] * ROOT_HALF)))
    elif activation == GELU_TANH:
        # (1 + tanh z) / 2 is 1 / (1 + e^(-2 z)).
        powers = np.empty(PANEL, np.float32)
        for j in range(PANEL):
            powers[j] = TANH_SCALE * (numbers[j] + CUBIC * numbers[j] * numbers[j] * numbers[j])
        _exponentials(powers)
        for j in range(PANEL):
            numbers[j] /= ONE + powers[j]


@numba.njit(nogil=True)
def _gate(stage: Any, row: int, part: int) -> None:
    """Some numbers of one row, gated: the SiLU of the one times the other."""
    first = part * GATED
    count = min(GATED, stage.outputs - first)
    source = stage.source + 4 * (row * stage.source_stride + first)
    gates, numbers = carray(_floats(source), count), carray(_floats(source + 4 * stage.outputs), count)
    target = carray(_floats(stage.target + 4 * (row * stage.target_stride + first)), count)
    powers = np.zeros(GATED, np.float32)
    for j in range(count):
        powers[j] = -gates[j]
    _exponentials(powers)
    for j in range(count):
        target[j] = gates[j] / (ONE + powers[j]) * numbers[j]


@numba.njit(fastmath=FAST, nogil=True)
def _norm(stage: Any, row: int) -> None:
    """The norm of one row."""
    width = stage.inputs
    source = carray(_floats(stage.source + 4 * row * stage.source_stride), width)
    target = carray(_floats(stage.target + 4 * row * stage.target_stride), width)
    weight = carray(_floats(stage.weights), width)
    total = ZERO
    for j in range(width):
        total += source[j]
    mean, spread = ZERO if stage.is_rms else total / np.float32(width), ZERO
    for j in range(width):
        spread += (source[j] - mean) * (source[j] - mean)
    factor = np.float32(1 / sqrt(spread / width + stage.number))
    for j in range(width):
        target[j] = (source[j] - mean) * factor * weight[j]
    if stage.bias:
        bias = carray(_floats(stage.bias), width)
        for j in range(width):
            target[j] += bias[j]


@numba.njit(fastmath=FAST, nogil=True)
def _attend(stage: Any, row: int, group: int, held: Any, weights: Any) -> None:
    """The queries of one row and one group of heads, after their own key and value are written."""
    width, shared = stage.width, stage.shared
    owner = carray(_longs(stage.owners), row + 1)[row] if stage.owners else row
    length = carray(_longs(stage.lengths), owner + 1)[owner] if stage.lengths else stage.length
    source = stage.source + 4 * row * stage.source_stride
    held, weights = held[:length], weights[: (length + LANES - 1) // LANES * LANES]
    _find(stage, row, group, owner, held)
    if stage.writes:
        last = held[length - 1]
        new_key = carray(_floats(source + 4 * (stage.groups * shared + group) * width), width)
        new_value = carray(_floats(source + 4 * (stage.values_at + group * width)), width)
        if stage.turned:
            _turn(stage, new_key)
        kept_key = carray(_floats(stage.keys + last), width)
        kept_value = carray(_floats(stage.values + last), width)
        for d in range(width):
            kept_key[d] = new_key[d]
            kept_value[d] = new_value[d]
    for i in range(shared):
        head = group * shared + i
        query = carray(_floats(source + 4 * head * width), width)
        if stage.turned:
            _turn(stage, query)
        target = carray(_floats(stage.target + 4 * (row * stage.target_stride + head * width)), width)
        _attend_one(query, stage.keys, stage.values, held, np.float32(stage.number), weights, target)


@numba.njit(nogil=True)
def _find(stage: Any, row: int, group: int, owner: int, held: Any) -> None:
    """Write where each key and value of one row and group stands, in bytes from the first of all."""
    first = 4 * (owner * stage.owner_stride + group * stage.group_stride)
    for t in range(held.size):
        held[t] = first + 4 * t * stage.key_stride
    if stage.placed:
        places = carray(_longs(stage.places), (row + 1) * stage.placed)
        for t in range(stage.placed):
            held[t] += 4 * (places[row * stage.placed + t] - owner) * stage.owner_stride


@numba.njit(nogil=True)
def _turn(stage: Any, vector: Any) -> None:
    """Turn a vector by the angles of its position, pair by pair of its numbers."""
    planes = stage.turned // 2
    cosines, sines = carray(_floats(stage.cosines), planes), carray(_floats(stage.sines), planes)
    for n in range(planes):
        place = n * stage.between_pairs
        x, y = vector[place], vector[place + stage.within_pair]
        vector[place] = x * cosines[n] - y * sines[n]
        vector[place + stage.within_pair] = y * cosines[n] + x * sines[n]


@numba.njit(fastmath=FAST, nogil=True)
def _attend_one(query: Any, keys: int, values: int, held: Any, scale: Any, weights: Any, target: Any) -> None:
    """The softmax of scaled dot products of one query, times the values. The weights have room for whole vectors."""
    width, length, largest = query.size, held.size, np.float32(-np.inf)
    for t in range(length):
        key, score = carray(_floats(keys + held[t]), width), ZERO
        for d in range(width):
            score += query[d] * key[d]
        weights[t] = score * scale
        largest = max(largest, weights[t])
    total = ZERO
    for t in range(weights.size):
        weights[t] = weights[t] - largest if t < length else ZERO
    _exponentials(weights)
    for t in range(length):
        total += weights[t]
    for d in range(width):
        target[d] = ZERO
    for t in range(length):
        value, weight = carray(_floats(values + held[t]), width), weights[t] / total
        for d in range(width):
            target[d] += weight * value[d]


@numba.njit(nogil=True)
def _most(stages: Any, steps: int) -> tuple[int, int]:
    """The most numbers of a row that is rounded, and the most keys of an attention, in whole vectors."""
    inputs = length = 0
    for number in range(stages.size):
        if stages[number].kind == ATTEND:
            length = max(length, stages[number].length)
        elif stages[number].kept == PAIRS:
            inputs = max(inputs, stages[number].inputs)
    return (inputs + LANES - 1) // LANES * LANES, (length + steps + LANES - 1) // LANES * LANES


@numba.njit(nogil=True)
def _shares_of(stage: Any, rows: int) -> int:
    """Into how many shares a stage is divided."""
    if stage.kind == PRODUCT:
        return (stage.outputs + PANEL - 1) // PANEL
    if stage.kind == NORM:
        return int(rows)
    if stage.kind == CUT:
        return (rows + TILE_ROWS - 1) // TILE_ROWS if stage.parts and rows >= TILE_ROWS else 0
    return rows * (stage.groups if stage.kind == ATTEND else (stage.outputs + GATED - 1) // GATED)


@numba.njit(nogil=True)
def _do(stage: Any, rows: int, share: int, sums: Any, keys: Any) -> None:
    if stage.kind == PRODUCT:
        _product(stage, rows, share, *sums)
    elif stage.kind == NORM:
        _norm(stage, share)
    elif stage.kind == ATTEND:
        _attend(stage, share // stage.groups, share % stage.groups, *keys)
    elif stage.kind == CUT:
        _cut(stage, rows, share * TILE_ROWS)
    else:
        _gate(stage, share % rows, share // rows)


@numba.njit(nogil=True)
def _is_due(work: Any, first: int) -> bool:
    """Wait until all shares before one are done. If the text ends before, the share is not due, nor are later ones."""
    while value_of(work.done) < first:
        if value_of(work.finished):
            return False
    return value_of(work.finished) == 0


@numba.njit(nogil=True)
def _write(work: Any, stages: Any, step: int, maxima: Any) -> None:
    """Choose the next token of the text, and make everything ready for the step after it."""
    choice = carray(_choices(work.choice), 1)[0]
    choice.logits = stages[stages.size - 1].target
    choose_in_group(choice, 0, maxima)
    token = carray(_longs(choice.places), 1)[0]
    carray(_longs(work.tokens), work.steps)[step] = token
    carray(_floats(work.gains), work.steps)[step] = carray(_floats(choice.values), 1)[0]
    if token == work.end:
        next_of(work.finished)
    if token == work.end or step + 1 == work.steps:
        return
    x, width = carray(_floats(work.x), work.width), work.width
    vector = carray(_floats(work.table + 4 * width * token), width)
    place = carray(_floats(work.positions + 4 * width * (step + 1)), width)
    for j in range(width):
        x[j] = vector[j] + place[j]
    for number in range(stages.size):
        if stages[number].kind == ATTEND and stages[number].writes:
            stages[number].length += 1


@numba.njit(nogil=True)
def _run(work: Any, stages: Any) -> None:
    """Take shares of the stages, in order, until there are no more."""
    inputs, length = _most(stages, work.steps)
    rows = max(TOGETHER, 2 * TILE_ROWS)
    sums = aligned_numbers(rows * PANEL).reshape(rows, PANEL), np.empty((TOGETHER, inputs), np.uint16)
    keys = np.empty(length, np.int64), np.empty(length, np.float32)
    maxima = room_for_maxima(stages[work.count - 1].outputs if work.choice else 0)
    first, share = 0, next_of(work.counter)
    for step in range(work.steps):
        for number in range(work.count):
            stage = stages[number]
            end = first + _shares_of(stage, work.rows)
            if share < end and not _is_due(work, first):
                return
            while share < end:
                _do(stage, work.rows, share - first, sums, keys)
                next_of(work.done)
                share = next_of(work.counter)
            first = end
        if work.choice:
            if share == first:
                if not _is_due(work, first):
                    return
                _write(work, stages, step, maxima)
                next_of(work.done)
                share = next_of(work.counter)
            first += 1


def _compiled(version: int) -> Any:
    """The function that threads call; see `regard.maps.row_loop` for why it closes over a version."""

    @compiled_function(types.void(types.CPointer(numba.from_dtype(WORK))))
    def run(pointer: Any) -> None:
        """Do all that there is to do; threads that call it at once share it.

        A thread waits for the stages before the one that it takes a share of, never for another thread to arrive: so
        one thread does all if the others never come.
        """
        _ = version
        work = carray(pointer, 1)[0]
        has_tiles = work.rows >= TILE_ROWS
        if has_tiles:
            configure_tiles(np.zeros(64, np.uint8))
        _run(work, carray(_stages(work.stages), work.count))
        if has_tiles:
            release_tiles()

    return run


SOURCES = (vector_code, tile_code, finishing, step_work, choice_loop, choice_work)
run = _compiled(crc32("".join(map(inspect.getsource, SOURCES)).encode(), HAS_TILES))
