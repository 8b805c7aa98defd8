"""The Triton program for the usual statistics of the weights of some rows; needs Triton.

A block of queries loops over blocks of its visible keys, as in a fused kernel. Each block of weights exists only in
registers, where it is summed down its columns, pooled, ranked, and read for its entropy.
"""

import triton
import triton.language as tl


@triton.jit
def bin_of(place, length, count):
    """The bin of an index, as in `regard.maps.statistics.pooling.Bins.index_of`."""
    size = length // count
    extra = length % count
    large = extra * (size + 1)
    return tl.where(place < large, place // (size + 1), extra + (place - large) // size)


@triton.jit
def read_rows(
    query, key, state, first, stop, keep, received, entropy, best, sums, peaks,
    scale, heads, group, queries, keys, width,
    query_batch, query_head, query_row, key_batch, key_head, key_row, range_batch, keep_batch,
    pooled_queries, pooled_keys, bin_rows, bin_columns,
    HAS_KEEP: tl.constexpr, FINDS_STATE: tl.constexpr, RANKED: tl.constexpr, POOLED: tl.constexpr,
    WIDENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Read the weights of ROWS queries of one head, over one part of their keys.

    The first dimension of the grid counts heads and blocks of queries, the second one parts: one if FINDS_STATE.

    Args:
        query: (B, H, T, D), with a last stride of 1.
        key: (B, G, S, D), with a last stride of 1.
        state: (B * H, T), the log-sum-exp to base 2, 1e30 for rows with no key; not read if FINDS_STATE.
        first, stop: (B or 1, T), the visible keys of each query.
        keep: (B or 1, S), the visible keys of all queries; not read unless HAS_KEEP.
        received: (B * H, S), zeros; accumulates the weights of each key.
        entropy: (parts, B * H, T), output: the terms of each part.
        best: (B * H, T, parts, RANKED), the largest weights with their keys, in any order; below 0 where there is none.
        sums, peaks: (B * H, rows, columns), zeros; accumulate the blocks of the picture.
        scale: the factor of the dot products, times log2(e).
        pooled_queries, pooled_keys: the lengths divided by the bins of the picture.
        WIDENS: whether products are made in float32. The interpreter reads the bits of bf16 as integers.
    """
    never = 1e30  # the row state of a row with no key
    ln_2 = 0.6931471805599453
    # A weight's bits and its key make one integer: of equal weights the first key makes the larger one.
    key_bits, last_key = 32, 4294967295
    blocks = tl.cdiv(queries, ROWS)
    flat_head = (tl.program_id(0) // blocks).to(tl.int64)
    # The last rows see the most keys under a causal mask, and begin first.
    block = blocks - 1 - tl.program_id(0) % blocks
    batch, head = flat_head // heads, flat_head % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    live = rows < queries
    dims = tl.arange(0, WIDTH)
    q = tl.load(
        query + batch * query_batch + head * query_head + rows.to(tl.int64)[:, None] * query_row + dims[None, :],
        mask=live[:, None] & (dims[None, :] < width), other=0.0,
    )  # fmt: skip
    q = q.to(tl.float32) if WIDENS else q
    of_key = key + batch * key_batch + (head // group) * key_head
    begin = tl.load(first + batch * range_batch + rows, mask=live, other=keys)
    end = tl.load(stop + batch * range_batch + rows, mask=live, other=0)
    low = tl.min(begin, 0) // COLUMNS * COLUMNS
    high = tl.max(end, 0)

    if FINDS_STATE:
        top = tl.full([ROWS], -never, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for start in range(low, high, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            k = tl.load(
                of_key + columns.to(tl.int64)[None, :] * key_row + dims[:, None],
                mask=(columns[None, :] < keys) & (dims[:, None] < width), other=0.0,
            )  # fmt: skip
            k = k.to(tl.float32) if WIDENS else k
            seen = (columns[None, :] >= begin[:, None]) & (columns[None, :] < end[:, None])
            if HAS_KEEP:
                kept = tl.load(keep + batch * keep_batch + columns, mask=columns < keys, other=0)
                seen = seen & (kept[None, :] != 0)
            scores = tl.where(seen, tl.dot(q, k, input_precision="ieee") * scale, -never)
            larger = tl.maximum(top, tl.max(scores, 1))
            total = total * tl.exp2(top - larger)
            total += tl.sum(tl.where(seen, tl.exp2(scores - larger[:, None]), 0.0), 1)
            top = larger
        dead = total == 0.0
        level = tl.where(dead, never, top + tl.log2(tl.where(dead, 1.0, total)))
    else:
        level = tl.load(state + flat_head * queries + rows, mask=live, other=never)

    part, parts = tl.program_id(1), tl.num_programs(1)
    length = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), COLUMNS), parts) * COLUMNS
    low += part * length
    high = tl.minimum(high, low + length)
    spread = tl.zeros([ROWS], tl.float32)
    if RANKED > 0:
        places = tl.arange(0, RANKED)
        # Each empty place has its own value, so the smallest is unique.
        ranked = tl.zeros([ROWS, RANKED], tl.int64) - 1 - places[None, :].to(tl.int64)
    if POOLED:
        of_picture = flat_head * bin_rows * bin_columns + bin_of(rows, pooled_queries, bin_rows) * bin_columns
    for start in range(low, high, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        k = tl.load(
            of_key + columns.to(tl.int64)[None, :] * key_row + dims[:, None],
            mask=(columns[None, :] < keys) & (dims[:, None] < width), other=0.0,
        )  # fmt: skip
        k = k.to(tl.float32) if WIDENS else k
        seen = (columns[None, :] >= begin[:, None]) & (columns[None, :] < end[:, None])
        if HAS_KEEP:
            kept = tl.load(keep + batch * keep_batch + columns, mask=columns < keys, other=0)
            seen = seen & (kept[None, :] != 0)
        logs = tl.where(seen, tl.dot(q, k, input_precision="ieee") * scale - level[:, None], 0.0)
        weights = tl.where(seen, tl.exp2(logs), 0.0)
        spread += tl.sum(weights * logs, 1)
        tl.atomic_add(received + flat_head * keys + columns, tl.sum(weights, 0), mask=columns < keys)
        if RANKED > 0:
            bits = weights.to(tl.int32, bitcast=True).to(tl.int64) << key_bits
            waiting = tl.where(weights > 0.0, bits + (last_key - columns.to(tl.int64))[None, :], 0)
            found, least = tl.max(waiting, 1), tl.min(ranked, 1)
            better = (found > 0) & (found > least)
            while tl.max(better.to(tl.int32), 0) > 0:
                takes = (ranked == least[:, None]) & better[:, None]
                ranked = tl.where(takes, found[:, None], ranked)
                waiting = tl.where(waiting == found[:, None], 0, waiting)
                found, least = tl.max(waiting, 1), tl.min(ranked, 1)
                better = (found > 0) & (found > least)
        if POOLED:
            column_bin = bin_of(columns, pooled_keys, bin_columns)
            last_column = tl.minimum(start + COLUMNS, keys) - 1
            for column in range(
                bin_of(start, pooled_keys, bin_columns), bin_of(last_column, pooled_keys, bin_columns) + 1
            ):
                inside = (column_bin == column)[None, :]
                by_row = tl.sum(tl.where(inside, weights, 0.0), 1)
                largest = tl.max(tl.where(inside, weights, 0.0), 1)
                tl.atomic_add(sums + of_picture + column, by_row, mask=live)
                tl.atomic_max(peaks + of_picture + column, largest, mask=live)
    flat_heads = tl.num_programs(0) // blocks
    tl.store(entropy + (part * flat_heads + flat_head) * queries + rows, -spread * ln_2, mask=live)
    if RANKED > 0:
        of_rows = ((flat_head * queries + rows.to(tl.int64)) * parts + part)[:, None] * RANKED + places[None, :]
        tl.store(best + of_rows, ranked, mask=live[:, None])
