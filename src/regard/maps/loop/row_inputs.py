"""The inputs of the loop over rows: its numbers, keys, states, and the weights of a few queries; needs numba."""

from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from regard.maps.sources import dot_scores
from regard.tensors.vector_code import LANES, LARGEST, PANEL, SMALLEST, VectorCode, pointers_to, transpose

LN_2 = np.float32(0.6931471805599453)
ZERO = np.float32(0)
# Sums may be reordered, for vectorization. Values are finite: `regard.maps.loop.one_loop` checks first.
FAST = {"nnan", "ninf", "nsz", "reassoc", "contract", "arcp"}
floats, doubles, longs = (pointers_to(kind) for kind in (types.float32, types.float64, types.int64))
NEVER = np.float32(dot_scores.NEVER)


@numba.njit(nogil=True)
def pack_keys(work: Any, head: int) -> bool:
    """Write the keys of one key head as panels (depth, PANEL), zero-padded; return whether they are finite."""
    batch, group = divmod(head, work.key_heads)
    start = work.key + 4 * (batch * work.key_batch_stride + group * work.key_head_stride)
    panels_at = work.panels + 4 * head * work.panel_count * work.depth * PANEL
    panels = carray(floats(panels_at), (work.panel_count, work.depth, PANEL))
    total, row = ZERO, 4 * work.key_stride
    for number in range(work.panel_count):
        panel, first = panels[number], number * PANEL
        count, depth = min(PANEL, work.keys - first), work.depth
        rows, columns = count // LANES * LANES, depth // LANES * LANES
        if count < PANEL:
            panel[:] = ZERO
        for j in range(0, rows, LANES):
            for d in range(0, columns, LANES):
                place = start + (first + j) * row + 4 * d
                transpose(place, work.key_stride, panel.ctypes.data + 4 * (d * PANEL + j), PANEL)
        for j in range(count):
            key = carray(floats(start + (first + j) * row), depth)
            for d in range(columns if j < rows else 0, depth):
                panel[d, j] = key[d]
        total += sum_of(panel.reshape(depth * PANEL))
    return np.isfinite(total)


@numba.njit(fastmath={"reassoc"}, nogil=True)
def sum_of(numbers: Any) -> Any:
    total = ZERO
    for j in range(numbers.size):
        total += numbers[j]
    return total


@numba.njit(nogil=True)
def take_row_states(work: Any, flat_head: int) -> bool:
    """Write the states of one flat_head to base 2; return whether they and the queries are finite."""
    batch, head = divmod(flat_head, work.heads)
    start = work.query + 4 * (batch * work.query_batch_stride + head * work.query_head_stride)
    given = carray(floats(work.lse + 4 * flat_head * work.queries), work.queries)
    state = carray(floats(work.state + 4 * flat_head * work.queries), work.queries)
    for i in range(work.queries):
        state[i] = NEVER if given[i] == -np.inf else given[i] / LN_2
    total = sum_of(state)
    for i in range(work.queries):
        total += sum_of(carray(floats(start + 4 * i * work.query_stride), work.depth))
    return np.isfinite(total)


def _kernel(rows: int, bins: int = 1) -> Any:
    def weigh(_context: Any, _places: Any, _scale: Any) -> Any:
        """Turn queries and a panel of keys into weights 2^(scale q k + added - state).

        Only the weights go to memory, for the ranking. LLVM compiles it for the host, with explicit vectors, because
        the auto-vectorizer keeps sums in memory.

        Places, which are addresses in bytes, strides in elements, and counts:
            query, stride: the queries, each `depth` elements.
            keys, depth: the panel (depth, PANEL).
            state: one element for each query.
            added, stride: the additions to the scores of each query; the address 0 stands for nothing.
            weights, stride: where the weights of each query are written.
            total, peak: (PANEL,), to which the sums over the queries are added, and the largest weights; those of the
                next bin stand `stride` further on.
            is_first: whether these two are not initialised.
            spread: (rows, LANES), to which sums of w log2 w are added.
            maxima: (rows, LANES), for the largest weight of each lane.
        """

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            code, (places, scale) = VectorCode(builder), arguments
            query, query_stride, keys, depth, state, added, added_stride, *outcome = cgutils.unpack_tuple(
                builder, places
            )
            weights, weights_stride, total, peak, is_first, spread, maxima = outcome
            lowest, zero = code.floats(SMALLEST), code.floats(0.0)
            factor = code.splat(scale)
            products = code.products(query, query_stride, keys, depth, rows)
            states = [builder.fneg(code.one(code.at(state, row))) for row in range(rows)]
            scores = [
                [code.call("fmuladd", product, factor, less) for product in line]
                for line, less in zip(products, states, strict=True)
            ]
            found = []
            for row, line in enumerate(code.with_added(scores, added, added_stride)):
                place = code.at(weights, builder.mul(weights_stride, code.long(row)))
                spent, made = code.load(code.at(spread, row * LANES)), []
                for vector, x in enumerate(line):
                    power = code.larger(code.call("minnum", x, code.floats(LARGEST)), lowest)
                    weight = builder.select(builder.fcmp_ordered(">", x, lowest), code.power_of_2(power), zero)
                    code.store(weight, code.at(place, vector * LANES))
                    spent = code.call("fmuladd", weight, power, spent)
                    made.append(weight)
                code.store(spent, code.at(spread, row * LANES))
                code.update(code.at(maxima, row * LANES), code.larger, code.of_all(code.larger, made))
                found.append(made)
            is_fresh = builder.icmp_signed("!=", is_first, code.long(0))
            for number in range(bins):
                lines = found[number * rows // bins : (number + 1) * rows // bins]
                start = builder.mul(weights_stride, code.long(number))
                for place, combine in ((total, builder.fadd), (peak, code.larger)):
                    for vector, column in enumerate(zip(*lines, strict=True)):
                        here = code.at(code.at(place, start), vector * LANES)
                        held = builder.select(is_fresh, zero, code.load(here))
                        code.store(code.of_all(combine, [held, *column]), here)
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.int64, 14), types.float32), generate

    return intrinsic(weigh)


weigh_4, weigh_3, weigh_2, weigh_1 = map(_kernel, (4, 3, 2, 1))
weigh_2_2, weigh_1_1_1_1 = _kernel(4, 2), _kernel(4, 4)
