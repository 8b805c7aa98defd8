"""Sums over the weights of a row: the distance, and the weights on chosen keys; needs numba."""

from typing import Any

import numba
import numpy as np
from numba import types
from numba.np.numpy_support import carray

from regard.tensors.vector_code import pointers_to

# Sums may be reordered, for vectorization. Values are finite: `regard.maps.loop.one_loop` checks first.
FAST = {"nnan", "ninf", "nsz", "reassoc", "contract", "arcp"}

_floats, _longs = (pointers_to(kind) for kind in (types.float32, types.int64))


@numba.njit(fastmath=FAST, nogil=True)
def distance_of(weights: int, count: int, position: int) -> Any:
    """sum_j w_j |position - j|."""
    row, total = carray(_floats(weights), count), np.float32(0)
    for j in range(count):
        total += row[j] * np.float32(abs(np.int32(position) - np.int32(j)))
    return total


@numba.njit(nogil=True)
def add_chosen(work: Any, flat_head: int, query: int, weights: int, first_key: int, count: int) -> None:
    """Write the sums of the weights of a query on its chosen keys."""
    row = carray(_floats(weights), count)
    sequence = flat_head * work.sequences // (work.batch * work.heads)
    for chain in range(work.chains):
        of = chain * work.sequences + sequence
        following = carray(_longs(work.chain_following + 8 * of * work.keys), work.keys)
        key, total = carray(_longs(work.chain_first + 8 * of * work.queries), work.queries)[query], 0.0
        while key >= first_key:
            if key < first_key + count:
                total += row[key - first_key]
            key = following[key]
        chosen = work.chosen + 4 * (flat_head * work.chains + chain) * work.queries
        carray(_floats(chosen), work.queries)[query] = np.float32(total)
