"""The Triton programs for the weight that each key receives, and for pictures; needs Triton.

A block of keys loops over the queries that see it, whose log-sum-exps are known. The product is S^T = K Q^T, so that
the sums and maxima over queries stay within a thread. They are written once for each bin of queries and key: nothing is
added atomically, and the same call has the same bits.
"""

import triton
import triton.language as tl

from regard.maps.loop.triton_rows import LANES, PAIR
from regard.maps.loop.triton_scores import LOG2_E, NEVER, capped, ends_of, vectors, wide

SCANNED = tl.constexpr(1024)
"""The queries whose ends are looked at together."""


@triton.jit
def _edge(number, length, count):
    return number * (length // count) + tl.minimum(number, length % count)


@triton.jit
def _block(
    k, q_at, of_rows, rows, dims, lse_at, first_at, stop_at, first_row, stop_row, places, bias_places, start, row_stop,
    width, query_row, scale, cap, slope, lower, upper, keys, received, peak,
    MASKED: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_STOP: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr,
    PEAKS: tl.constexpr, EXACT: tl.constexpr, WIDENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the queries start + rows. MASKED: whether some of them do not see all of the keys."""
    here = start + rows
    at = q_at + wide(start) * query_row + of_rows
    q = vectors(at, here, row_stop, dims, width, MASKED, EXACT, WIDENS)
    level = tl.load(lse_at + here, mask=here < row_stop, other=NEVER) if MASKED else tl.load(lse_at + here)
    scores = tl.dot(k, q, input_precision="ieee")
    if CAPPED:
        scores = capped(scores, scale, cap)
    factor = 1.0 if CAPPED else scale
    if SLOPED:
        scores -= slope * tl.abs(rows[None, :] - (bias_places - start)[:, None]).to(tl.float32)
    x = scores * factor - level[None, :]
    if MASKED:
        begin, end = ends_of(
            here, here < row_stop, first_at, stop_at, first_row, stop_row, lower, upper, keys, HAS_FIRST, HAS_STOP
        )
        x = tl.where((places[:, None] >= begin[None, :]) & (places[:, None] < end[None, :]), x, -NEVER)
    lanes = tl.reshape(tl.exp2(x), (COLUMNS, ROWS // (LANES * PAIR), LANES, PAIR))
    received += tl.sum(tl.sum(lanes, 3), 1)
    if PEAKS:
        peak = tl.maximum(peak, tl.max(tl.max(lanes, 3), 1))
    return received, peak


@triton.jit
def _rows_of(
    first_at, stop_at, first_row, stop_row, lower, upper, queries, keys, first_key, stop_key,
    HAS_FIRST: tl.constexpr, HAS_STOP: tl.constexpr,
):  # fmt: skip
    low, high = tl.maximum(first_key - upper + 1, 0), tl.minimum(stop_key - lower, queries)
    all_low, all_high = stop_key - upper, first_key - lower + 1
    if HAS_FIRST or HAS_STOP:
        some_low, some_high = queries, 0
        all_low, all_high, count = queries, 0, 0
        for start in range(low // SCANNED * SCANNED, high, SCANNED):
            rows = start + tl.arange(0, SCANNED)
            begin, end = ends_of(
                rows, rows < queries, first_at, stop_at, first_row, stop_row, lower, upper, keys, HAS_FIRST, HAS_STOP
            )
            sees = (begin < stop_key) & (end > first_key) & (begin < end)
            sees_all = (begin <= first_key) & (end >= stop_key)
            some_low = tl.minimum(some_low, tl.min(tl.where(sees, rows, queries), 0))
            some_high = tl.maximum(some_high, tl.max(tl.where(sees, rows + 1, 0), 0))
            all_low = tl.minimum(all_low, tl.min(tl.where(sees_all, rows, queries), 0))
            all_high = tl.maximum(all_high, tl.max(tl.where(sees_all, rows + 1, 0), 0))
            count += tl.sum(sees_all.to(tl.int32), 0)
        low, high = some_low, some_high
        # Queries that see the block whole, but not side by side, are masked as others are.
        all_high = tl.where(count == all_high - all_low, all_high, all_low)
    return low, high, all_low, all_high


@triton.jit
def read_columns(
    query, key, lse, first, stop, keep, slopes, sums, peaks,
    scale, cap, heads, group, queries, keys, width,
    query_batch, query_head, query_row, key_batch, key_head, key_row,
    first_batch, first_row, stop_batch, stop_row, keep_batch, slope_head,
    lower, upper, bias_offset, bins, bins_of_part, first_head,
    HAS_FIRST: tl.constexpr, HAS_STOP: tl.constexpr, HAS_KEEP: tl.constexpr, CAPPED: tl.constexpr,
    SLOPED: tl.constexpr, PEAKS: tl.constexpr, EXACT: tl.constexpr, WIDENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Read the weights of COLUMNS keys of one head, for the queries of some bins.

    The first dimension of the grid counts heads and blocks of keys, the second one parts of the bins.

    Args:
        lse: (B * H, T), the log-sum-exp to base 2, NEVER for rows without keys.
        sums, peaks: (heads of the grid, bins, S), outputs: the sum and the largest of each key's weights; the latter if
            PEAKS.
        first_head: the first head of the grid, of B * H.
        The others are those of `regard.maps.loop.triton_rows.read_rows`.
    """
    blocks = tl.cdiv(keys, COLUMNS)
    chosen, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    flat_head = first_head + chosen
    batch, head = (flat_head // heads).to(tl.int64), flat_head % heads
    first_key, stop_key = block * COLUMNS, tl.minimum(block * COLUMNS + COLUMNS, keys)
    places = first_key + tl.arange(0, COLUMNS)
    live, rows, dims = places < keys, tl.arange(0, ROWS), tl.arange(0, WIDTH)
    kept = live
    if HAS_KEEP:
        kept = tl.load(keep + batch * keep_batch + places, mask=live, other=0) != 0
    # Keys that are hidden are read as 0, whatever they hold, and their sums are dropped.
    k = tl.load(
        key + batch * key_batch + (head // group).to(tl.int64) * key_head + places.to(tl.int64)[:, None] * key_row
        + dims[None, :],
        mask=kept[:, None] & (dims < width)[None, :], other=0.0,
    )  # fmt: skip
    k = k.to(tl.float32) if WIDENS else k
    q_at = query + batch * query_batch + wide(head) * query_head
    of_rows = rows[None, :] * query_row + dims[:, None]
    lse_at = lse + flat_head.to(tl.int64) * queries
    first_at, stop_at = first + batch * first_batch, stop + batch * stop_batch
    slope = 0.0
    if SLOPED:
        slope = tl.load(slopes + head * slope_head).to(tl.float32) * LOG2_E / (1.0 if CAPPED else scale)
    low, high, all_low, all_high = _rows_of(
        first_at, stop_at, first_row, stop_row, lower, upper, queries, keys, first_key, stop_key, HAS_FIRST, HAS_STOP
    )
    begun = tl.program_id(1) * bins_of_part
    for number in range(begun, tl.minimum(begun + bins_of_part, bins)):
        begin = tl.maximum(_edge(number, queries, bins), low)
        end = tl.minimum(_edge(number + 1, queries, bins), high)
        received, peak = (tl.zeros([COLUMNS, LANES], tl.float32),) * 2
        lead = tl.cdiv(tl.maximum(tl.minimum(all_low, end) - begin, 0), ROWS) * ROWS
        whole = begin + lead
        whole_stop = whole + tl.maximum(tl.minimum(all_high, end) - whole, 0) // ROWS * ROWS
        edges = (begin, whole, whole_stop, end)
        for third in tl.static_range(3):
            for start in tl.range(edges[third], edges[third + 1], ROWS, num_stages=STAGES if third == 1 else None):
                received, peak = _block(
                    k, q_at, of_rows, rows, dims, lse_at, first_at, stop_at, first_row, stop_row, places,
                    places - bias_offset, start, end, width, query_row, scale, cap, slope, lower, upper, keys, received,
                    peak, third != 1, HAS_FIRST, HAS_STOP, CAPPED, SLOPED, PEAKS, EXACT, WIDENS, ROWS, COLUMNS,
                )  # fmt: skip
        total, largest = tl.sum(received, 1), tl.max(peak, 1)
        if HAS_KEEP:
            total, largest = tl.where(kept, total, 0.0), tl.where(kept, largest, 0.0)
        out = (chosen.to(tl.int64) * bins + number) * keys + places
        tl.store(sums + out, total, mask=live)
        if PEAKS:
            # A maximum passes over NaN, and a sum does not.
            tl.store(peaks + out, tl.where(total == total, largest, total), mask=live)


@triton.jit
def pool_keys(
    sums, peaks, pooled_sum, pooled_mean, pooled_max, queries, keys, row_bins, column_bins, largest_bin, first_head,
    SUM: tl.constexpr, MEAN: tl.constexpr, MAX: tl.constexpr, BINS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The blocks of pictures from one bin of queries: BINS bins of keys, KEYS keys of each at a time.

    The first dimension of the grid counts heads and bins of queries, the second one blocks of bins of keys.

    Args:
        sums, peaks: (heads of the grid, row_bins, S), the outputs of `read_columns`.
        pooled_sum, pooled_mean, pooled_max: (B * H, row_bins, column_bins), outputs if SUM, MEAN and MAX.
        largest_bin: the most keys of a bin.
        first_head: as in `read_columns`.
    """
    line, row = tl.program_id(0).to(tl.int64), tl.program_id(0) % row_bins
    bins = tl.program_id(1) * BINS + tl.arange(0, BINS)
    begin, end = _edge(bins, keys, column_bins), _edge(bins + 1, keys, column_bins)
    there = bins < column_bins
    total, largest = tl.zeros([BINS], tl.float32), tl.zeros([BINS], tl.float32)
    for start in range(0, largest_bin, KEYS):
        places = begin[:, None] + start + tl.arange(0, KEYS)[None, :]
        mask = there[:, None] & (places < end[:, None])
        total += tl.sum(tl.load(sums + line * keys + places, mask=mask, other=0.0), 1)
        if MAX:
            largest = tl.maximum(largest, tl.max(tl.load(peaks + line * keys + places, mask=mask, other=0.0), 1))
    out = (wide(first_head) * row_bins + line) * column_bins + bins
    if SUM:
        tl.store(pooled_sum + out, total, mask=there)
    if MEAN:
        area = (end - begin) * (_edge(row + 1, queries, row_bins) - _edge(row, queries, row_bins))
        tl.store(pooled_mean + out, total / area.to(tl.float32), mask=there)
    if MAX:
        tl.store(pooled_max + out, tl.where(total == total, largest, total), mask=there)
