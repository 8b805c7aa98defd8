"""One loop over the rows of a map for all of the usual statistics; needs numba.

The tiles of `regard.maps.statistics.tiles` are read once for each statistic, from memory larger than the cache. Here
the weights of a few rows are made by `regard.maps.loop.weights_block`, summed in registers, and pooled and ranked in
the cache.
"""

import inspect
from typing import Any
from zlib import crc32

import numba
import numpy as np
from numba import types
from numba.np.numpy_support import carray

from regard.maps.loop import picture_blocks, row_ranks, row_tiles, weights_block
from regard.maps.loop.picture_blocks import max_blocks, sum_blocks
from regard.maps.loop.row_ranks import rank, room_for
from regard.maps.loop.row_tiles import TILE, WORK
from regard.maps.loop.weights_block import weigh_1, weigh_1_1_1_1, weigh_2, weigh_2_2, weigh_3, weigh_4
from regard.maps.sources import dot_scores
from regard.tensors import vector_code
from regard.tensors.vector_code import LANES, PANEL, aligned_numbers, compiled_function, next_of, pointers_to, transpose

LN_2 = np.float32(0.6931471805599453)
ZERO, NEVER = np.float32(0), np.float32(dot_scores.NEVER)
TOGETHER = 4
"""The most queries in one block of weights."""
FLUSHED = 64
"""Sums by key are float32 for so many rows, and only then added to those in float64."""
# Sums may be reordered, for vectorization. Values are finite: `regard.maps.loop.one_loop` checks first.
FAST = {"nnan", "ninf", "nsz", "reassoc", "contract", "arcp"}


_floats, _doubles, _longs = (pointers_to(kind) for kind in (types.float32, types.float64, types.int64))
_tiles: Any = pointers_to(numba.from_dtype(TILE))


@numba.njit(fastmath=FAST, nogil=True)
def _pool(
    total: Any,
    peak: Any,
    columns: int,
    edges: Any,
    first_key: int,
    row_share: Any,
    shares: Any,
    sums: Any,
    largest: Any,
) -> None:
    column = np.searchsorted(edges, first_key, side="right") - 1
    bins, j = edges.size - 1, 0
    wider = edges[bins] % bins  # This many bins come first and have one key more than the others.
    while j < columns:
        width, count = edges[column + 1] - first_key - j, 1
        # Whole blocks of one width are pooled together.
        if edges[column] - first_key == j:
            count = min((wider if column < wider else bins) - column, (columns - j) // width)
        if count == 0:
            count = 1
        width = min(width, columns - j)  # The last keys may end within a block.
        done, share = count // LANES * LANES, row_share * shares[column]
        if sums.size:
            done = _sum_vectors(total.ctypes.data + 4 * j, width, done, share, sums.ctypes.data + 4 * column)
        if largest.size:
            done = _max_vectors(peak.ctypes.data + 4 * j, width, done, largest.ctypes.data + 4 * column)
        first, last, key = column + done, column + count, j + done * width
        _pool_blocks(total[key:], peak[key:], width, share, sums[first:last], largest[first:last])
        j, column = j + width * count, column + count


@numba.njit(nogil=True)
def _sum_vectors(numbers: int, width: int, count: int, share: Any, picture: int) -> int:
    return sum_blocks(numbers, width, count, share, picture)  # (Apart from `_pool`, whose sums may be reordered.)


@numba.njit(nogil=True)
def _max_vectors(numbers: int, width: int, count: int, picture: int) -> int:
    return max_blocks(numbers, width, count, ZERO, picture)


@numba.njit(fastmath=FAST, nogil=True)
def _pool_blocks(total: Any, peak: Any, width: int, share: Any, sums: Any, largest: Any) -> None:
    # Two loops, because LLVM gives up on one with so many possibly overlapping arrays.
    for column in range(sums.size):
        added = ZERO
        for j in range(column * width, (column + 1) * width):
            added += total[j]
        sums[column] += added * share
    for column in range(largest.size):
        best = ZERO
        for j in range(column * width, (column + 1) * width):
            best = max(best, peak[j])
        largest[column] = max(largest[column], best)


@numba.njit(fastmath=FAST, nogil=True)
def _entropy(spread: Any) -> Any:
    total = ZERO
    for lane in range(LANES):
        total += spread[lane]
    return -total * LN_2


@numba.njit(nogil=True)
def _pack(work: Any, head: int) -> bool:
    """Write the keys of one key head as panels (depth, PANEL), zero-padded; return whether they are finite."""
    batch, group = divmod(head, work.key_heads)
    start = work.key + 4 * (batch * work.key_batch_stride + group * work.key_head_stride)
    panels_at = work.panels + 4 * head * work.panel_count * work.depth * PANEL
    panels = carray(_floats(panels_at), (work.panel_count, work.depth, PANEL))
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
            key = carray(_floats(start + (first + j) * row), depth)
            for d in range(columns if j < rows else 0, depth):
                panel[d, j] = key[d]
        total += _sum(panel.reshape(depth * PANEL))
    return np.isfinite(total)


@numba.njit(fastmath={"reassoc"}, nogil=True)
def _sum(numbers: Any) -> Any:
    """A sum, which is finite only if all elements are."""
    total = ZERO
    for j in range(numbers.size):
        total += numbers[j]
    return total


@numba.njit(nogil=True)
def _take_rows(work: Any, flat_head: int) -> bool:
    """Write the states of one flat_head to base 2; return whether they and the queries are finite."""
    batch, head = divmod(flat_head, work.heads)
    start = work.query + 4 * (batch * work.query_batch_stride + head * work.query_head_stride)
    given = carray(_floats(work.lse + 4 * flat_head * work.queries), work.queries)
    state = carray(_floats(work.state + 4 * flat_head * work.queries), work.queries)
    for i in range(work.queries):
        state[i] = NEVER if given[i] == -np.inf else given[i] / LN_2
    total = _sum(state)
    for i in range(work.queries):
        total += _sum(carray(_floats(start + 4 * i * work.query_stride), work.depth))
    return np.isfinite(total)


@numba.njit(nogil=True)
def _room_of(work: Any) -> Any:
    """The scratch memory of a thread, passed as an address, see `regard.maps.loop.row_ranks.room_for`."""
    width = work.panel_count * PANEL
    ranks = room_for(width if work.ranked else 0)
    return aligned_numbers(TOGETHER * (3 * width + 2 * LANES) + width), ranks


@numba.njit(nogil=True)
def _read_share(work: Any, flat_head: int, piece: int, memory: int, room_at: int) -> None:
    width, ranked = work.panel_count * PANEL, work.ranked
    # The weights of a few rows, their maxima, and sums and maxima over the rows of each bin.
    weights_at, total_at = memory, memory + 4 * TOGETHER * width
    peak_at = total_at + 4 * TOGETHER * width
    maxima_at = peak_at + 4 * TOGETHER * width
    spread_at = maxima_at + 4 * TOGETHER * LANES
    total, peak = (carray(_floats(total_at), (TOGETHER, width)), carray(_floats(peak_at), (TOGETHER, width)))
    maxima, spread = carray(_floats(maxima_at), TOGETHER * LANES), carray(_floats(spread_at), (TOGETHER, LANES))
    held = carray(_floats(spread_at + 4 * TOGETHER * LANES), width)
    held[:] = ZERO
    batch, head = divmod(flat_head, work.heads)
    key_head = batch * work.key_heads + head // (work.heads // work.key_heads)
    query = work.query + 4 * (batch * work.query_batch_stride + head * work.query_head_stride)
    panels = work.panels + 4 * key_head * width * work.depth
    state = work.state + 4 * flat_head * work.queries
    rows = carray(_longs(work.piece_edges), work.pieces + 1)
    bins = carray(_longs(work.row_edges), work.row_bins + 1)
    edges = carray(_longs(work.column_edges), work.column_bins + 1)
    row_shares = carray(_floats(work.row_shares), work.row_bins)
    shares = carray(_floats(work.column_shares), work.column_bins)
    received = carray(_doubles(work.received + 8 * (flat_head * work.pieces + piece) * width), width)
    entropy = carray(_floats(work.entropy + 4 * flat_head * work.queries), work.queries)
    distance = carray(_floats(work.distance + 4 * flat_head * work.queries), work.queries * work.has_distance)
    sums_at, peaks_at = (
        work.sums + 4 * flat_head * work.row_bins * work.sum_bins,
        work.peaks + 4 * flat_head * work.row_bins * work.peak_bins,
    )
    sums = carray(_floats(sums_at), (work.row_bins, work.sum_bins))
    peaks = carray(_floats(peaks_at), (work.row_bins, work.peak_bins))
    tiles, misses = carray(_tiles(work.tiles), work.tile_count), carray(_floats(work.misses), work.batch * work.heads)
    if work.is_first:
        _clear(work, flat_head, rows[piece], rows[piece + 1], received, entropy, bins, sums, peaks)
    for number in range(work.tile_count):
        tile = tiles[number]
        row, end = max(tile.start, rows[piece]), min(tile.stop, rows[piece + 1])
        if row >= end or tile.first_panel >= tile.stop_panel:
            continue
        added = work.added + 4 * (tile.added + batch * tile.batch_stride + head * tile.head_stride)
        first_key = tile.first_panel * PANEL
        seen = tile.stop_panel * PANEL - first_key
        columns = min(seen, work.keys - first_key)
        bin_of = np.searchsorted(bins, row, side="right") - 1
        begun = flushed = row
        while row < end:
            together, bins_together = _rows_together(bins, bin_of, row, end, row == begun)
            spread[:] = ZERO
            maxima[:] = ZERO
            query_at, state_at = query + 4 * row * work.query_stride, state + 4 * row
            added_at = added + 4 * (row - tile.start) * tile.row_stride
            for panel in range(tile.first_panel, tile.stop_panel):
                here = 4 * (panel - tile.first_panel) * PANEL
                more_at = added_at + 4 * (panel - tile.added_panel) * PANEL if panel >= tile.added_panel else 0
                at = (
                    query_at, work.query_stride, panels + 4 * panel * PANEL * work.depth, work.depth, state_at,
                    more_at, tile.row_stride, weights_at + here, width, total_at + here, peak_at + here,
                    np.int64(row == begun), spread_at, maxima_at,
                )  # fmt: skip
                if together < TOGETHER:
                    _weigh_few(at, together, work.scale)
                elif bins_together == 1:
                    weigh_4(at, work.scale)
                elif bins_together == 2:
                    weigh_2_2(at, work.scale)
                else:
                    weigh_1_1_1_1(at, work.scale)
            for i in range(together):
                entropy[row + i], row_weights = _entropy(spread[i]), weights_at + 4 * i * width
                if work.has_distance:
                    distance[row + i] = _distance(row_weights, seen, row + i + work.offset - first_key)
                if work.chains:
                    _add_chosen(work, flat_head, row + i, row_weights, first_key, seen)
                if ranked:
                    row_at = (flat_head * work.queries + row + i) * ranked
                    rank(
                        row_weights, seen, work.top + 4 * row_at, work.places + 8 * row_at, ranked,
                        first_key, maxima_at + 4 * i * LANES, room_at,
                    )  # fmt: skip
            if row + together == work.queries:
                last = weights_at + 4 * (together - 1) * width
                misses[flat_head] = np.float32(abs(np.log(_sum(carray(_floats(last), seen)))))
            row += together
            is_bin_done = row == bins[bin_of + bins_together]
            if row == end or row - flushed >= FLUSHED or (is_bin_done and work.column_bins > 0):
                for one in range(bins_together):
                    for j in range(columns):
                        held[j] += total[one, j]
                    if work.column_bins:
                        to = bin_of + one
                        share = row_shares[to]
                        _pool(total[one], peak[one], columns, edges, first_key, share, shares, sums[to], peaks[to])
                begun = row
            if row == end or row - flushed >= FLUSHED:
                for j in range(columns):
                    received[first_key + j] += held[j]
                held[:columns] = ZERO
                flushed = row
            if is_bin_done:
                bin_of += bins_together


@numba.njit(fastmath=FAST, nogil=True)
def _distance(weights: int, count: int, position: int) -> Any:
    """sum_j w_j |position - j|."""
    row, total = carray(_floats(weights), count), np.float32(0)
    for j in range(count):
        total += row[j] * np.float32(abs(np.int32(position) - np.int32(j)))
    return total


@numba.njit(nogil=True)
def _add_chosen(work: Any, flat_head: int, query: int, weights: int, first_key: int, count: int) -> None:
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


@numba.njit(nogil=True)
def _clear(
    work: Any, flat_head: int, first: int, last: int, received: Any, entropy: Any, bins: Any, sums: Any, peaks: Any
) -> None:
    """Initialise the answers.

    Each share does so itself, to have the memory in its cache.
    """
    received[:] = 0.0
    entropy[first:last] = ZERO
    if work.has_distance:
        carray(_floats(work.distance + 4 * flat_head * work.queries), work.queries)[first:last] = ZERO
    chosen_at = work.chosen + 4 * flat_head * work.chains * work.queries
    carray(_floats(chosen_at), (work.chains, work.queries))[:, first:last] = ZERO
    first_ranked, count = (flat_head * work.queries + first) * work.ranked, (last - first) * work.ranked
    carray(_floats(work.top + 4 * first_ranked), count)[:] = ZERO
    carray(_longs(work.places + 8 * first_ranked), count)[:] = -1
    first_bin, last_bin = np.searchsorted(bins, first), np.searchsorted(bins, last)
    sums[first_bin:last_bin] = ZERO
    peaks[first_bin:last_bin] = ZERO


@numba.njit(nogil=True, inline="always")
def _rows_together(bins: Any, bin_of: int, row: int, end: int, is_begun: bool) -> tuple[int, int]:
    """The number of rows for the next block of weights, and its number of whole bins.

    A panel of keys takes about as long for four rows as for two. Four rows are in one bin, in two bins of two rows, or
    in four.
    """
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
    """The two functions for threads.

    numba caches compiled code by the file of the function and by its closure. The closure has the version of the other
    source files, so older code is not reused.
    """
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
            is_finite = _pack(work, one) if one < heads else _take_rows(work, one - heads)
            if not is_finite:
                next_of(work.not_finite)
            one = next_of(work.counter)

    @compiled_function(kind)
    def read_rows(pointer: Any) -> None:
        """Process shares until none is left; concurrent threads share them.

        The last rows come first: under a causal mask they take longest, and short shares fill the end evenly.
        """
        _ = version
        work = carray(pointer, 1)[0]
        flat_heads = work.batch * work.heads
        memory, room = _room_of(work)
        share = next_of(work.counter)
        while share < flat_heads * work.pieces:
            _read_share(
                work, share % flat_heads, work.pieces - 1 - share // flat_heads, memory.ctypes.data, room.ctypes.data
            )
            share = next_of(work.counter)
        # An address does not hold its memory, freed after the last line that names it.
        memory[0] = room[0] = ZERO

    return prepare, read_rows


_PARTS = (weights_block, picture_blocks, row_ranks, vector_code, row_tiles)
prepare, read_rows = _compiled(crc32("".join(map(inspect.getsource, _PARTS)).encode()))
