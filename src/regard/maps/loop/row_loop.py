"""One loop over the rows of a map for all of the usual statistics; needs numba.

The tiles of `regard.maps.statistics.tiles` are read once for each statistic, from memory larger than the cache. Here
the weights of a few rows on a panel of keys are made and summed in vector registers, and pooled and ranked in
the cache.
"""

import inspect
from typing import Any, NamedTuple
from zlib import crc32

import numba
import numpy as np
from numba import types
from numba.np.numpy_support import carray

from regard.maps.loop import row_inputs, row_pictures, row_ranks, row_tiles
from regard.maps.loop.row_inputs import (
    FAST,
    LN_2,
    ZERO,
    doubles,
    floats,
    longs,
    pack_keys,
    take_row_states,
    weigh_1,
    weigh_1_1_1_1,
    weigh_2,
    weigh_2_2,
    weigh_3,
    weigh_4,
)
from regard.maps.loop.row_pictures import pool
from regard.maps.loop.row_ranks import rank, room_for
from regard.maps.loop.row_tiles import TILE, WORK
from regard.tensors import vector_code
from regard.tensors.vector_code import (
    LANES,
    PANEL,
    aligned_numbers,
    compiled_function,
    next_of,
    pointers_to,
)

TOGETHER = 4
"""The most queries in one block of weights."""
FLUSHED = 64
"""Sums by key are float32 for so many rows, and only then added to those in float64."""
_tiles: Any = pointers_to(numba.from_dtype(TILE))


@numba.njit(fastmath=FAST, nogil=True)
def _entropy(spread: Any) -> Any:
    total = ZERO
    for lane in range(LANES):
        total += spread[lane]
    return -total * LN_2


@numba.njit(nogil=True)
def _room_of(work: Any) -> Any:
    """The scratch memory of a thread, passed as an address, see `regard.maps.loop.row_ranks.room_for`."""
    width = work.panel_count * PANEL
    ranks = room_for(width if work.ranked else 0)
    return aligned_numbers(TOGETHER * (3 * width + 2 * LANES) + width), ranks


class _Scratch(NamedTuple):
    """The memory of a thread for the rows that it reads together: addresses of those that other functions fill."""

    width: int
    weights: int
    """(TOGETHER, width)."""
    maxima: Any
    """(TOGETHER * LANES,), the largest weights of each row, by lanes."""
    spread: Any
    """(TOGETHER, LANES), the entropies to base 2, by lanes."""
    total: Any
    """(TOGETHER, width), the sums over the rows of each bin."""
    peak: Any
    """The same, of the largest weights."""
    held: Any
    """(width,), the sums by key of at most FLUSHED rows."""
    room: int


class _Bins(NamedTuple):
    rows: Any
    columns: Any
    row_shares: Any
    column_shares: Any


class _Answers(NamedTuple):
    received: Any
    entropy: Any
    distance: Any
    sums: Any
    peaks: Any


@numba.njit(nogil=True)
def _scratch_of(work: Any, memory: int, room: int) -> Any:
    width = work.panel_count * PANEL
    total, block = memory + 4 * TOGETHER * width, 4 * TOGETHER * width
    maxima = total + 2 * block
    spread = maxima + 4 * TOGETHER * LANES
    held = carray(floats(spread + 4 * TOGETHER * LANES), width)
    held[:] = ZERO
    return _Scratch(
        width,
        memory,
        carray(floats(maxima), TOGETHER * LANES),
        carray(floats(spread), (TOGETHER, LANES)),
        carray(floats(total), (TOGETHER, width)),
        carray(floats(total + block), (TOGETHER, width)),
        held,
        room,
    )


@numba.njit(nogil=True)
def _bins_of(work: Any) -> Any:
    return _Bins(
        carray(longs(work.row_edges), work.row_bins + 1),
        carray(longs(work.column_edges), work.column_bins + 1),
        carray(floats(work.row_shares), work.row_bins),
        carray(floats(work.column_shares), work.column_bins),
    )


@numba.njit(nogil=True)
def _answers_of(work: Any, flat_head: int, piece: int) -> Any:
    width, rows = work.panel_count * PANEL, flat_head * work.queries
    sums, peaks = flat_head * work.row_bins * work.sum_bins, flat_head * work.row_bins * work.peak_bins
    return _Answers(
        carray(doubles(work.received + 8 * (flat_head * work.pieces + piece) * width), width),
        carray(floats(work.entropy + 4 * rows), work.queries),
        carray(floats(work.distance + 4 * rows), work.queries * work.has_distance),
        carray(floats(work.sums + 4 * sums), (work.row_bins, work.sum_bins)),
        carray(floats(work.peaks + 4 * peaks), (work.row_bins, work.peak_bins)),
    )


@numba.njit(nogil=True)
def _read_share(work: Any, flat_head: int, piece: int, scratch: Any) -> None:
    rows, tiles = carray(longs(work.piece_edges), work.pieces + 1), carray(_tiles(work.tiles), work.tile_count)
    bins, answers = _bins_of(work), _answers_of(work, flat_head, piece)
    if work.is_first:
        _clear(work, flat_head, rows[piece], rows[piece + 1], bins.rows, answers)
    for number in range(work.tile_count):
        tile = tiles[number]
        first, end = max(tile.start, rows[piece]), min(tile.stop, rows[piece + 1])
        if first < end and tile.first_panel < tile.stop_panel:
            _read_tile(work, flat_head, tile, first, end, bins, scratch, answers)


@numba.njit(nogil=True)
def _read_tile(
    work: Any, flat_head: int, tile: Any, first: int, end: int, bins: Any, scratch: Any, answers: Any
) -> None:
    """Read some rows of a tile, up to four together; sums are added up by bins, and before they have many rows."""
    row = begun = flushed = first
    bin_of: Any = np.searchsorted(bins.rows, row, side="right") - 1
    while row < end:
        together, bins_together = _rows_together(bins.rows, bin_of, row, end, row == begun)
        _weigh(work, flat_head, tile, row, together, bins_together, row == begun, scratch)
        _read_rows(work, flat_head, tile, row, together, scratch, answers)
        row += together
        is_bin_done = row == bins.rows[bin_of + bins_together]
        is_flushed = row == end or row - flushed >= FLUSHED
        if is_flushed or (is_bin_done and work.column_bins > 0):
            _add_bins(work, tile, bin_of, bins_together, bins, scratch, answers)
            begun = row
        if is_flushed:
            _flush(work, tile, scratch, answers)
            flushed = row
        if is_bin_done:
            bin_of += bins_together


@numba.njit(nogil=True)
def _weigh(
    work: Any, flat_head: int, tile: Any, row: int, together: int, bins_together: int, is_begun: bool, scratch: Any
) -> None:
    batch, head = divmod(flat_head, work.heads)
    key_head = batch * work.key_heads + head // (work.heads // work.key_heads)
    panels = work.panels + 4 * key_head * scratch.width * work.depth
    query = work.query + 4 * (batch * work.query_batch_stride + head * work.query_head_stride + row * work.query_stride)
    state = work.state + 4 * (flat_head * work.queries + row)
    added = work.added + 4 * (
        tile.added + batch * tile.batch_stride + head * tile.head_stride + (row - tile.start) * tile.row_stride
    )
    total, peak = scratch.total.ctypes.data, scratch.peak.ctypes.data
    spread, maxima = scratch.spread.ctypes.data, scratch.maxima.ctypes.data
    scratch.spread[:] = ZERO
    scratch.maxima[:] = ZERO
    for panel in range(tile.first_panel, tile.stop_panel):
        here = 4 * (panel - tile.first_panel) * PANEL
        more = added + 4 * (panel - tile.added_panel) * PANEL if panel >= tile.added_panel else 0
        at = (
            query, work.query_stride, panels + 4 * panel * PANEL * work.depth, work.depth, state,
            more, tile.row_stride, scratch.weights + here, scratch.width, total + here, peak + here,
            np.int64(is_begun), spread, maxima,
        )  # fmt: skip
        if together < TOGETHER:
            _weigh_few(at, together, work.scale)
        elif bins_together == 1:
            weigh_4(at, work.scale)
        elif bins_together == 2:
            weigh_2_2(at, work.scale)
        else:
            weigh_1_1_1_1(at, work.scale)


@numba.njit(nogil=True)
def _read_rows(work: Any, flat_head: int, tile: Any, first: int, together: int, scratch: Any, answers: Any) -> None:
    first_key = tile.first_panel * PANEL
    seen = tile.stop_panel * PANEL - first_key
    for i in range(together):
        row, weights = first + i, scratch.weights + 4 * i * scratch.width
        answers.entropy[row] = _entropy(scratch.spread[i])
        if work.has_distance:
            answers.distance[row] = _distance(weights, seen, row + work.offset - first_key)
        if work.chains:
            _add_chosen(work, flat_head, row, weights, first_key, seen)
        if work.ranked:
            at = (flat_head * work.queries + row) * work.ranked
            maxima = scratch.maxima.ctypes.data + 4 * i * LANES
            rank(weights, seen, work.top + 4 * at, work.places + 8 * at, work.ranked, first_key, maxima, scratch.room)


@numba.njit(nogil=True)
def _seen_keys(work: Any, tile: Any) -> int:
    return min(tile.stop_panel * PANEL, work.keys) - tile.first_panel * PANEL


@numba.njit(nogil=True)
def _add_bins(work: Any, tile: Any, first_bin: int, together: int, bins: Any, scratch: Any, answers: Any) -> None:
    columns, first_key = _seen_keys(work, tile), tile.first_panel * PANEL
    for one in range(together):
        for j in range(columns):
            scratch.held[j] += scratch.total[one, j]
        if work.column_bins:
            to = first_bin + one
            share, sums, peaks = bins.row_shares[to], answers.sums[to], answers.peaks[to]
            total, peak = scratch.total[one], scratch.peak[one]
            pool(total, peak, columns, bins.columns, first_key, share, bins.column_shares, sums, peaks)


@numba.njit(nogil=True)
def _flush(work: Any, tile: Any, scratch: Any, answers: Any) -> None:
    columns, first_key = _seen_keys(work, tile), tile.first_panel * PANEL
    for j in range(columns):
        answers.received[first_key + j] += scratch.held[j]
    scratch.held[:columns] = ZERO


@numba.njit(fastmath=FAST, nogil=True)
def _distance(weights: int, count: int, position: int) -> Any:
    row, total = carray(floats(weights), count), np.float32(0)
    for j in range(count):
        total += row[j] * np.float32(abs(np.int32(position) - np.int32(j)))
    return total


@numba.njit(nogil=True)
def _add_chosen(work: Any, flat_head: int, query: int, weights: int, first_key: int, count: int) -> None:
    row = carray(floats(weights), count)
    sequence = flat_head * work.sequences // (work.batch * work.heads)
    for chain in range(work.chains):
        of = chain * work.sequences + sequence
        following = carray(longs(work.chain_following + 8 * of * work.keys), work.keys)
        key, total = carray(longs(work.chain_first + 8 * of * work.queries), work.queries)[query], 0.0
        while key >= first_key:
            if key < first_key + count:
                total += row[key - first_key]
            key = following[key]
        chosen = work.chosen + 4 * (flat_head * work.chains + chain) * work.queries
        carray(floats(chosen), work.queries)[query] = np.float32(total)


@numba.njit(nogil=True)
def _clear(work: Any, flat_head: int, first: int, last: int, bins: Any, answers: Any) -> None:
    """Each share initialises its answers itself, to have the memory in its cache."""
    answers.received[:] = 0.0
    answers.entropy[first:last] = ZERO
    if work.has_distance:
        answers.distance[first:last] = ZERO
    chosen_at = work.chosen + 4 * flat_head * work.chains * work.queries
    carray(floats(chosen_at), (work.chains, work.queries))[:, first:last] = ZERO
    first_ranked, count = (flat_head * work.queries + first) * work.ranked, (last - first) * work.ranked
    carray(floats(work.top + 4 * first_ranked), count)[:] = ZERO
    carray(longs(work.places + 8 * first_ranked), count)[:] = -1
    first_bin, last_bin = np.searchsorted(bins, first), np.searchsorted(bins, last)
    answers.sums[first_bin:last_bin] = ZERO
    answers.peaks[first_bin:last_bin] = ZERO


@numba.njit(nogil=True, inline="always")
def _rows_together(bins: Any, bin_of: int, row: int, end: int, is_begun: bool) -> tuple[int, int]:
    """The number of rows for the next block of weights, and its number of whole bins. A panel of keys takes about as
    long for four rows as for two. Four rows are in one bin, in two bins of two rows, or in four."""
    left = min(bins[bin_of + 1], end) - row
    if left >= TOGETHER:
        return TOGETHER, 1
    if is_begun and left < 3 and row + TOGETHER <= end:
        count = TOGETHER // left
        if bin_of + count < bins.size and bins[bin_of + count] == row + TOGETHER:
            return TOGETHER, count
    return left, 1


@numba.njit(nogil=True)
def _weigh_few(at: Any, rows: int, scale: Any) -> None:
    if rows == 3:
        weigh_3(at, scale)
    elif rows == 2:
        weigh_2(at, scale)
    else:
        weigh_1(at, scale)


def _compiled(version: int) -> tuple[Any, Any]:
    """numba caches compiled code by the file of the function and by its closure. The closure has the version of the
    other source files, so older code is not reused."""
    kind = types.void(types.CPointer(numba.from_dtype(WORK)))

    @compiled_function(kind)
    def prepare(pointer: Any) -> None:
        """Pack the keys, write the states to base 2, and check for finite values; concurrent threads share the
        heads.
        """
        _ = version
        work = carray(pointer, 1)[0]
        heads, flat_heads = work.batch * work.key_heads, work.batch * work.heads
        one = next_of(work.counter)
        while one < heads + flat_heads:
            is_finite = pack_keys(work, one) if one < heads else take_row_states(work, one - heads)
            if not is_finite:
                next_of(work.not_finite)
            one = next_of(work.counter)

    @compiled_function(kind)
    def read_rows(pointer: Any) -> None:
        """The last rows come first: under a causal mask they take longest, and short shares fill the end evenly."""
        _ = version
        work = carray(pointer, 1)[0]
        flat_heads = work.batch * work.heads
        memory, room = _room_of(work)
        share = next_of(work.counter)
        while share < flat_heads * work.pieces:
            scratch = _scratch_of(work, memory.ctypes.data, room.ctypes.data)
            _read_share(work, share % flat_heads, work.pieces - 1 - share // flat_heads, scratch)
            share = next_of(work.counter)
        # An address does not hold its memory, freed after the last line that names it.
        memory[0] = room[0] = ZERO

    return prepare, read_rows


_PARTS = (row_inputs, row_pictures, row_ranks, vector_code, row_tiles)
prepare, read_rows = _compiled(crc32("".join(map(inspect.getsource, _PARTS)).encode()))
