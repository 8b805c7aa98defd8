"""The numbers of the loop over rows, its keys and its states, and whether they are finite; needs numba."""

from typing import Any

import numba
import numpy as np
from numba import types
from numba.np.numpy_support import carray

from regard.maps.sources import dot_scores
from regard.tensors.vector_code import LANES, PANEL, pointers_to, transpose

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
