"""The parts of all Triton programs for statistics: visible keys of a query, tiles of vectors, scores; needs Triton.

Scores and log-sum-exps are to base 2: the scale of the dot products contains log2(e).
"""

import triton
import triton.language as tl

NEVER = tl.constexpr(1e30)
"""The log-sum-exp of a row without keys, and the least largest score of a row: weights 2^-NEVER are 0."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def wide(number):
    """A number in 64 bits, also one that Triton has made a constant of, because it is 1."""
    return tl.zeros([], tl.int64) + number


@triton.jit
def ends_of(
    rows, live, first, stop, first_row, stop_row, lower, upper, keys, HAS_FIRST: tl.constexpr, HAS_STOP: tl.constexpr
):
    """The first visible key of each query and the one after its last; `keys` and 0 for rows that are not live.

    `lower` and `upper` are the ends relative to the query; `first` and `stop` are given ends.
    """
    begin, end = tl.maximum(rows + lower, 0), tl.minimum(rows + upper, keys)
    if HAS_FIRST:
        given = tl.load(first + rows.to(tl.int64) * first_row, mask=live, other=0)
        begin = tl.maximum(begin, tl.minimum(given, keys).to(tl.int32))
    if HAS_STOP:
        given = tl.load(stop + rows.to(tl.int64) * stop_row, mask=live, other=0)
        end = tl.minimum(end, tl.minimum(given, keys).to(tl.int32))
    return tl.where(live, begin, keys), tl.where(live, end, 0)


@triton.jit
def vectors(at, places, stop, dims, width, CHECKED: tl.constexpr, EXACT: tl.constexpr, WIDENS: tl.constexpr):
    """A tile of vectors (D, places); 0 at places from `stop` on, which are looked at if CHECKED.

    EXACT: whether `width` is the number of dims. WIDENS: the interpreter reads the bits of bf16 as integers.
    """
    if CHECKED:
        found = tl.load(at, mask=(places < stop)[None, :] & (EXACT | (dims < width)[:, None]), other=0.0)
    elif EXACT:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=(dims < width)[:, None], other=0.0)
    return found.to(tl.float32) if WIDENS else found


@triton.jit
def capped(scores, scale, cap):
    """cap tanh(scale scores), without the cancellation of 1 - exp(-2 |x|) near 0."""
    x = scores * scale
    size = tl.abs(x)
    power = tl.exp2(size * (-2 * LOG2_E))
    far = (1 - power) / (1 + power)
    square = x * x
    near = size * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    size = tl.where(size < 0.25, near, far)
    return cap * tl.where(x < 0, -size, size)
