"""The Triton programs for each query: log-sum-exp, entropy, largest weight, distance, k largest weights; needs Triton.

A block of queries loops over blocks of its visible keys, as in a fused kernel, and no key crosses a thread: the online
softmax runs for LANES groups of keys apart, as a thread holds them, and they are joined at the end. No number is added
atomically, so that the same call has the same bits.

**The k largest weights.** Each block of keys is a few groups of adjacent keys. The k groups whose largest scores are
the largest contain the k largest weights, the first of equal ones first; each row keeps them in order, and
`rank_groups` multiplies their keys again.
"""

import triton
import triton.language as tl

from regard.maps.loop.triton_scores import LOG2_E, NEVER, capped, ends_of, vectors, wide

LANES = tl.constexpr(4)
"""The threads that share a row of a product of tensor cores: they hold two of every eight keys."""
PAIR = tl.constexpr(2)
NO_GROUP = tl.constexpr(2147483647)


@triton.jit
def _inserted(best, groups, value, group):
    """Values and groups in order, with one more among them: before smaller ones, behind equal ones."""
    kept, kept_groups = (), ()
    for i in tl.static_range(len(best)):
        is_larger = value > best[i]
        kept += (tl.where(is_larger, value, best[i]),)
        kept_groups += (tl.where(is_larger, group, groups[i]),)
        value, group = tl.where(is_larger, best[i], value), tl.where(is_larger, groups[i], group)
    return kept, kept_groups


@triton.jit
def _block(
    q, k_at, of_columns, columns, dims, keep_at, begin, end, here, bias_here, start, keys, width, key_row, scale, cap,
    slope, last_value, last_group, top, total, spread, far, best, groups,
    MASKED: tl.constexpr, HAS_KEEP: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr, ENTROPY: tl.constexpr,
    DISTANCE: tl.constexpr, RANKED: tl.constexpr, GROUPS: tl.constexpr, LATER: tl.constexpr, EXACT: tl.constexpr,
    WIDENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the keys start + columns to the row's sums: for each lane, relative to its largest score so far.

    MASKED: whether some row does not see all of them.
    """
    places = start + columns
    at = k_at + wide(start) * key_row + of_columns
    k = vectors(at, places, keys, dims, width, MASKED, EXACT, WIDENS)
    scores = tl.dot(q, k, input_precision="ieee")
    if CAPPED:
        scores = capped(scores, scale, cap)
    factor = 1.0 if CAPPED else scale
    if SLOPED:
        scores -= slope * tl.abs((bias_here - start)[:, None] - columns[None, :]).to(tl.float32)
    hides: tl.constexpr = MASKED or HAS_KEEP
    if hides:
        seen = (places[None, :] >= begin[:, None]) & (places[None, :] < end[:, None])
        if HAS_KEEP:
            seen &= (tl.load(keep_at + places, mask=places < keys, other=0) != 0)[None, :]
        scores = tl.where(seen, scores, -float("inf"))
    shape: tl.constexpr = (ROWS, COLUMNS // (LANES * PAIR), LANES, PAIR)
    lanes = tl.reshape(scores, shape)
    if RANKED > 0 and GROUPS == LANES * PAIR:
        found = tl.max(tl.reshape(scores, (ROWS, COLUMNS // (LANES * PAIR), LANES * PAIR)), 1)
        largest = tl.max(tl.reshape(found, (ROWS, LANES, PAIR)), 2)
    else:
        largest = tl.max(tl.max(lanes, 3), 1)
        found = largest
    if RANKED > 0:
        if LATER:
            group = start + (tl.arange(0, GROUPS) * (COLUMNS // GROUPS))[None, :]
            is_later = (found < last_value) | ((found == last_value) & (group > last_group))
            found = tl.where(is_later, found, -float("inf"))
        best, groups = _inserted(best, groups, found, start)
    larger = tl.maximum(top, largest * factor)
    x = lanes * factor - larger[:, None, :, None]
    if hides:
        x = tl.where(tl.reshape(seen, shape), x, -NEVER)  # (Its product with a weight of 0 is 0.)
    weights, shrink = tl.exp2(x), tl.exp2(top - larger)
    if ENTROPY:
        spread = shrink * (spread + total * (top - larger)) + tl.sum(tl.sum(weights * x, 3), 1)
    mass = tl.sum(tl.sum(weights, 3), 1)
    if DISTANCE != "":
        far *= shrink
    if DISTANCE == "before":
        within = tl.reshape(tl.broadcast_to(columns.to(tl.float32)[None, :], (ROWS, COLUMNS)), shape)
        far += mass * (here - start).to(tl.float32)[:, None] - tl.sum(tl.sum(weights * within, 3), 1)
    if DISTANCE == "both":
        away = tl.abs((here - start)[:, None] - columns[None, :]).to(tl.float32)
        far += tl.sum(tl.sum(weights * tl.reshape(away, shape), 3), 1)
    return larger, total * shrink + mass, spread, far, best, groups


@triton.jit
def _joined(tops, totals, spreads, fars):
    top = tl.max(tops, 1)
    shift = tops - top[:, None]
    shrink = tl.exp2(shift)
    spread = tl.sum(shrink * (spreads + totals * shift), 1)
    return top, tl.sum(shrink * totals, 1), spread, tl.sum(shrink * fars, 1)


@triton.jit
def _finish(
    sink, lse, entropy, largest, distance, out, live, top, total, spread, far,
    HAS_SINKS: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """Write the answers of rows from sums relative to their largest score.

    `out` are the places of the rows. HAS_SINKS: `sink` is one more score of a row, of a key that is none of its keys.
    """
    sums = tl.where(total == 0.0, 1.0, total)
    level, mass = tl.log2(sums), 1.0
    if HAS_SINKS:
        peak = tl.maximum(top, sink)
        level = peak - top + tl.log2(sums * tl.exp2(top - peak) + tl.exp2(sink - peak))
        mass = sums * tl.exp2(-level)
        sums = tl.exp2(level)
    dead = (total == 0.0) & (spread == spread)
    level, mass = tl.where(dead, 0.0, level), tl.where(dead, 0.0, mass)
    # An infinite score has the log-sum-exp inf: its own weight is NaN, and the others are 0.
    found = tl.where(top == float("inf"), top, top + level)
    tl.store(lse + out, tl.where(total == 0.0, NEVER, found), mask=live)
    bits = 0.6931471805599453 * (level * mass - spread / sums)
    # No sum is just below 0, unless a weight is just above 1: of 1,024 units of rounding.
    tl.store(entropy + out, tl.where((bits <= 0.0) & (bits >= -1.220703125e-4), 0.0, bits), mask=live)
    tl.store(largest + out, tl.where(total == 0.0, 0.0, 1.0 / sums), mask=live)
    if DISTANCE != "":
        tl.store(distance + out, tl.where(dead, 0.0, far / sums), mask=live)


@triton.jit
def read_rows(
    query, key, sinks, first, stop, keep, slopes, lse, entropy, largest, distance, partial, group_values, groups,
    scale, cap, heads, group, queries, keys, width,
    query_batch, query_head, query_row, key_batch, key_head, key_row,
    first_batch, first_row, stop_batch, stop_row, keep_batch, slope_head, sink_batch, sink_head,
    lower, upper, offset, bias_offset, group_count, begun,
    HAS_SINKS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_STOP: tl.constexpr, HAS_KEEP: tl.constexpr,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr, ENTROPY: tl.constexpr, DISTANCE: tl.constexpr, RANKED: tl.constexpr,
    GROUPS: tl.constexpr, LATER: tl.constexpr, IN_PARTS: tl.constexpr, EXACT: tl.constexpr, WIDENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Read the scores of ROWS queries of one head, over one part of their keys.

    The first dimension of the grid counts heads and blocks of queries, the second one parts of the keys.

    Args:
        query: (B, H, T, D), with a last stride of 1.
        key: (B, G, S, D), with a last stride of 1.
        sinks: (B, H) if HAS_SINKS: the score of one more key, without a value.
        first, stop: (B or 1, T), ends of the visible keys of each query, if HAS_FIRST and HAS_STOP.
        keep: (B or 1, S), the visible keys of all queries, if HAS_KEEP.
        slopes: (H,) if SLOPED: a score is lowered by the slope for each place between query and key.
        lse: (B * H, T), output: the log-sum-exp to base 2, NEVER for rows without keys.
        entropy, largest, distance: (B * H, T), outputs; the last one unless DISTANCE is empty.
        partial: (parts, 4, B * H, T), the output in place of these if IN_PARTS, for `join_parts`.
        group_values, groups: (B * H, T, group_count), output: the largest scores of the groups and their first keys; -1
            where there are no more. Each part writes RANKED in order, from number `begun` on.
        scale: the factor of the dot products, times log2(e); divided by the cap in place of that if CAPPED.
        cap: the soft cap times log2(e).
        lower, upper: the visible keys relative to the query.
        offset, bias_offset: query i stands at i + offset for the distance, and for the slopes.
        DISTANCE: "before" if no visible key is behind the query's place, "both", or "" for none.
        LATER: whether the groups follow those before `begun`.
    """
    blocks = tl.cdiv(queries, ROWS)
    flat_head = tl.program_id(0) // blocks
    # The last rows see the most keys under a causal mask, and begin first.
    block = blocks - 1 - tl.program_id(0) % blocks
    batch, head = (flat_head // heads).to(tl.int64), flat_head % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    live, dims, of_tile = rows < queries, tl.arange(0, WIDTH), tl.arange(0, COLUMNS)
    # In this order the keys of a thread, and of a group, are adjacent.
    columns = of_tile % (LANES * PAIR) * (COLUMNS // (LANES * PAIR)) + of_tile // (LANES * PAIR)
    q = tl.load(
        query + batch * query_batch + wide(head) * query_head + rows.to(tl.int64)[:, None] * query_row
        + dims[None, :],
        mask=live[:, None] & (dims < width)[None, :], other=0.0,
    )  # fmt: skip
    q = q.to(tl.float32) if WIDENS else q
    k_at = key + batch * key_batch + (head // group).to(tl.int64) * key_head
    of_columns = columns[None, :] * key_row + dims[:, None]
    begin, end = ends_of(
        rows, live, first + batch * first_batch, stop + batch * stop_batch, first_row, stop_row, lower, upper, keys,
        HAS_FIRST, HAS_STOP,
    )  # fmt: skip
    seeing = begin < end
    low = tl.min(tl.where(seeing, begin, keys), 0) // COLUMNS * COLUMNS
    high = tl.max(tl.where(seeing, end, 0), 0)
    part, parts = tl.program_id(1), tl.num_programs(1)
    length = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), COLUMNS), parts) * COLUMNS
    low += part * length
    high = tl.minimum(high, low + length)
    # Blocks of keys that all rows see need no mask.
    all_low = tl.cdiv(tl.max(tl.where(live, begin, 0), 0), COLUMNS) * COLUMNS
    all_high = tl.minimum(tl.min(tl.where(live, end, keys), 0), high) // COLUMNS * COLUMNS
    all_low = tl.minimum(tl.maximum(all_low, low), low + tl.cdiv(tl.maximum(high - low, 0), COLUMNS) * COLUMNS)
    all_high = tl.maximum(all_high, all_low)

    slope, last_value, last_group = 0.0, 0.0, 0
    if SLOPED:
        slope = tl.load(slopes + head * slope_head).to(tl.float32) * LOG2_E / (1.0 if CAPPED else scale)
    if LATER:
        last = (flat_head.to(tl.int64) * queries + rows) * group_count + begun + (part - parts + 1) * RANKED - 1
        last_value = tl.load(group_values + last, mask=live, other=0.0)[:, None]
        last_group = tl.load(groups + last, mask=live, other=0)[:, None]
    top = tl.full([ROWS, LANES], -NEVER, tl.float32)
    total, spread, far = (tl.zeros([ROWS, LANES], tl.float32),) * 3
    # A list holds the block of a group; its place in the list is its place in the block.
    nothing, no_group = tl.full([ROWS, GROUPS], -float("inf"), tl.float32), tl.full([ROWS, GROUPS], -1, tl.int32)
    best, found = (), ()
    for _ in tl.static_range(RANKED):
        best += (nothing,)
        found += (no_group,)
    here, bias_here, keep_at = rows + offset, rows + bias_offset, keep + batch * keep_batch
    # The blocks before those that all rows see, these, and those behind them.
    edges = (low, all_low, all_high, high)
    for third in tl.static_range(3):
        for start in tl.range(
            edges[third], edges[third + 1], COLUMNS, num_stages=STAGES if third == 1 else None
        ):  # fmt: skip
            top, total, spread, far, best, found = _block(
                q, k_at, of_columns, columns, dims, keep_at, begin, end, here, bias_here, start, keys, width, key_row,
                scale, cap, slope, last_value, last_group, top, total, spread, far, best, found, third != 1,
                HAS_KEEP, CAPPED, SLOPED, ENTROPY, DISTANCE, RANKED, GROUPS, LATER, EXACT, WIDENS, ROWS, COLUMNS,
            )  # fmt: skip
    out = flat_head.to(tl.int64) * queries + rows
    one_top, one_total, one_spread, one_far = _joined(top, total, spread, far)
    if IN_PARTS:
        flat_heads = tl.num_programs(0) // blocks
        each = flat_heads.to(tl.int64) * queries
        at = partial + part * 4 * each + out
        tl.store(at, one_top, mask=live)
        tl.store(at + each, one_total, mask=live)
        tl.store(at + 2 * each, one_spread, mask=live)
        tl.store(at + 3 * each, one_far, mask=live)
    else:
        sink = 0.0
        if HAS_SINKS:
            sink = tl.load(sinks + batch * sink_batch + head * sink_head).to(tl.float32) * LOG2_E
        _finish(
            sink, lse, entropy, largest, distance, out, live, one_top, one_total, one_spread, one_far,
            HAS_SINKS, DISTANCE,
        )  # fmt: skip
    if RANKED > 0:
        to = out * group_count + begun + part * RANKED
        for rank in range(RANKED):
            # Each column of the lists is in order: the first of their heads is next.
            value = tl.max(best[0], 1)
            is_largest = best[0] == value[:, None]
            group_at = tl.where(
                found[0] < 0, NO_GROUP, found[0] + (tl.arange(0, GROUPS) * (COLUMNS // GROUPS))[None, :]
            )
            chosen = tl.min(tl.where(is_largest, group_at, NO_GROUP), 1)
            tl.store(group_values + to + rank, value, mask=live)
            tl.store(groups + to + rank, tl.where(chosen == NO_GROUP, -1, chosen), mask=live)
            takes = is_largest & (group_at == chosen[:, None])
            below, groups_below = best[1:], found[1:]
            below += (nothing,)
            groups_below += (no_group,)
            kept, kept_groups = (), ()
            for i in tl.static_range(RANKED):
                kept += (tl.where(takes, below[i], best[i]),)
                kept_groups += (tl.where(takes, groups_below[i], found[i]),)
            best, found = kept, kept_groups


@triton.jit
def join_parts(
    partial, sinks, lse, entropy, largest, distance, rows_in_all, parts, queries, heads, sink_batch, sink_head,
    HAS_SINKS: tl.constexpr, DISTANCE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Join what the parts of `read_rows` have found of ROWS rows of all heads. PARTS: a power of two."""
    out = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live, part = out < rows_in_all, tl.arange(0, PARTS)
    at = partial + part[None, :] * 4 * wide(rows_in_all) + out[:, None]
    there = live[:, None] & (part < parts)[None, :]
    tops = tl.load(at, mask=there, other=-NEVER)
    totals = tl.load(at + wide(rows_in_all), mask=there, other=0.0)
    spreads = tl.load(at + 2 * wide(rows_in_all), mask=there, other=0.0)
    fars = tl.load(at + 3 * wide(rows_in_all), mask=there, other=0.0)
    top, total, spread, far = _joined(tops, totals, spreads, fars)
    sink = 0.0
    if HAS_SINKS:
        head = out // queries
        sink = tl.load(sinks + head // heads * sink_batch + head % heads * sink_head, mask=live, other=0.0)
        sink = sink.to(tl.float32) * LOG2_E
    _finish(sink, lse, entropy, largest, distance, out, live, top, total, spread, far, HAS_SINKS, DISTANCE)


KEY_BITS, LAST_KEY = tl.constexpr(31), tl.constexpr(2147483647)
"""A score's bits, in the order of the scores, and its key make one integer: of equal scores the first key makes the
larger one.
"""


@triton.jit
def _in_order(bits):
    """The bits of a float32 as an integer in the order of the numbers, and back."""
    return bits ^ ((bits >> 31) & 2147483647)


@triton.jit
def rank_groups(
    query, key, lse, largest, first, stop, keep, slopes, groups, values, places,
    scale, cap, heads, group, queries, keys, width,
    query_batch, query_head, query_row, key_batch, key_head, key_row,
    first_batch, first_row, stop_batch, stop_row, keep_batch, slope_head,
    lower, upper, bias_offset, group_count, ranked,
    HAS_FIRST: tl.constexpr, HAS_STOP: tl.constexpr, HAS_KEEP: tl.constexpr, CAPPED: tl.constexpr,
    SLOPED: tl.constexpr, WIDENS: tl.constexpr,
    SIZE: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Rank the visible keys of some groups for ROWS queries of a head, FEW keys at a time, DIMS of a vector at a time.

    Args:
        lse: (B * H, T), NaN for rows whose weights all are.
        largest: (B * H, T), the largest weight, to which the others are relative.
        groups: (B * H, T, group_count), the first key of each group of SIZE keys; -1 for no group.
        values: (B * H, T, ranked), output: the largest weights in order; 0 where there are no more.
        places: the same, their keys; -1 where there are no more.
        The others are those of `regard.maps.loop.triton_rows.read_rows`. PLACES: a power of two, not below `ranked`.
    """
    blocks = tl.cdiv(queries, ROWS)
    flat_head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    batch, head = (flat_head // heads).to(tl.int64), flat_head % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    live, dims, of_few, order = rows < queries, tl.arange(0, DIMS), tl.arange(0, FEW), tl.arange(0, PLACES)
    q_at = query + batch * query_batch + wide(head) * query_head + rows.to(tl.int64) * query_row
    k_at = key + batch * key_batch + (head // group).to(tl.int64) * key_head
    begin, end = ends_of(
        rows, live, first + batch * first_batch, stop + batch * stop_batch, first_row, stop_row, lower, upper, keys,
        HAS_FIRST, HAS_STOP,
    )  # fmt: skip
    out = flat_head.to(tl.int64) * queries + rows
    # Each empty place has its own value, so that the smallest is unique.
    best = tl.zeros([ROWS, PLACES], tl.int64) - 1 - order[None, :].to(tl.int64)
    for begun in range(0, group_count * SIZE, FEW):
        number = (begun + of_few) // SIZE
        there = live[:, None] & (number < group_count)[None, :]
        start = tl.load(groups + out[:, None] * group_count + number[None, :], mask=there, other=-1)
        at = start + (of_few % SIZE)[None, :]
        seen = (start >= 0) & (at >= begin[:, None]) & (at < end[:, None])
        if HAS_KEEP:
            seen &= tl.load(keep + batch * keep_batch + at, mask=seen, other=0) != 0
        scores = tl.zeros([ROWS, FEW], tl.float32)
        for dim in range(0, width, DIMS):
            inside = dim + dims < width
            q = tl.load(q_at[:, None] + (dim + dims)[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            k = tl.load(
                k_at + at.to(tl.int64)[:, :, None] * key_row + (dim + dims)[None, None, :],
                mask=seen[:, :, None] & inside[None, None, :], other=0.0,
            )  # fmt: skip
            scores += tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32), 2)
        scores = capped(scores, scale, cap) if CAPPED else scores * scale
        if SLOPED:
            slope = tl.load(slopes + head * slope_head).to(tl.float32) * LOG2_E
            scores -= slope * tl.abs((rows + bias_offset)[:, None] - at).to(tl.float32)
        bits = _in_order(scores.to(tl.int32, bitcast=True)).to(tl.int64) + LAST_KEY + 1
        waiting = tl.where(seen & (scores == scores), (bits << KEY_BITS) + (LAST_KEY - at), 0)
        found, least = tl.max(waiting, 1), tl.min(best, 1)
        better = (found > 0) & (found > least)
        while tl.max(better.to(tl.int32), 0) > 0:
            takes = (best == least[:, None]) & better[:, None]
            best = tl.where(takes, found[:, None], best)
            waiting = tl.where(waiting == found[:, None], 0, waiting)
            found, least = tl.max(waiting, 1), tl.min(best, 1)
            better = (found > 0) & (found > least)
    is_nan, most = tl.load(lse + out, mask=live, other=0.0), tl.load(largest + out, mask=live, other=0.0)
    is_nan = is_nan != is_nan
    first_score = tl.zeros([ROWS], tl.float32)
    for rank in range(ranked):
        top = tl.max(best, 1)
        score = _in_order(((top >> KEY_BITS) - LAST_KEY - 1).to(tl.int32)).to(tl.float32, bitcast=True)
        first_score = tl.where(rank == 0, score, first_score)
        share = tl.exp2(score - first_score)
        weight = tl.where((top < 0) | (share == 0.0), 0.0, share * most)
        place = tl.where(weight == 0.0, -1, LAST_KEY - (top & LAST_KEY))
        tl.store(values + out * ranked + rank, tl.where(is_nan, most, weight), mask=live)
        tl.store(places + out * ranked + rank, tl.where(is_nan, tl.minimum(begin + rank, end - 1), place), mask=live)
        best = tl.where(best == top[:, None], -1 - PLACES, best)
