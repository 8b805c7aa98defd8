"""The Triton program for the k largest weights of each query, among the keys of a few groups; needs Triton."""

import triton
import triton.language as tl

from regard.maps.loop.triton_scores import LOG2_E, capped, ends_of, wide

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
