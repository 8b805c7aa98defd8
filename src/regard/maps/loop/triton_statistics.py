"""The usual statistics of softmax weights on a GPU by one kernel, if Triton is installed.

Tiles (`regard.maps.statistics.tiles`) write each block of weights to memory and read it once for each statistic. The
program of `regard.maps.loop.triton_rows` reads it in registers, and allocates nothing of T x S. For scores without a
row state, it computes that first, in the same program.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.call.masks.row_ranges import RowRanges
from regard.call.normalizations import Softmax
from regard.kernels.base import Call
from regard.maps.loop.one_loop import Wanted
from regard.maps.sources.source import SoftmaxCall, Source, Statistic
from regard.maps.statistics import definitions as st
from regard.tensors.guards import has_values, in_forward_mode, in_transform, is_recorded
from regard.tensors.readable import row_contiguous
from regard.tensors.triton_use import or_else, runs_triton

NAME = "statistics"
FEWEST_QUERIES = 16
"""A block of the program has at least so many rows: for fewer queries tiles are faster."""
WIDEST = 256
ENOUGH_PROGRAMS, SHORTEST_PART = 1024, 2048
"""The programs that fill a GPU, and the fewest keys worth a program."""
KEY_BITS, LAST_KEY = 32, 2**32 - 1
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def said_of_triton(call: Call) -> str | None:
    """The line of `explain` for the statistics of a call's weights; None for calls irrelevant to the kernel."""
    if not runs_triton(call.query.device, NAME):
        return None
    reason = _why_tiles(call)
    return "by one kernel (Triton)" if reason is None else f"by tiles: {reason}"


def in_one_kernel(source: Source, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]] | None:
    """The answers (flat_heads, ...) of several statistics, as in `regard.maps.statistics.tiles.one_pass`.

    None, for a fallback to tiles, if a statistic is not among those of the kernel, if it cannot take the call, if a
    gradient is needed, or if a value is not finite. In float32 it multiplies without tensor cores, so it leaves
    statistics by calls of a fused kernel to them.
    """
    if not runs_triton(source.device, NAME) or in_forward_mode() or in_transform("Vmap", "Jvp", "Grad"):
        return None
    asked = _wanted(statistics)
    made = None if asked is None else source.softmax_call()
    if asked is None or made is None or not source.flat_heads or not all(map(has_values, source.tensors())):
        return None
    if is_recorded() and any(tensor.requires_grad for tensor in source.tensors()):
        return None
    if _why_tiles(made.call) is not None:
        return None
    if made.call.query.dtype == torch.float32 and not any(statistic.needs_tiles for statistic in statistics):
        return None
    with torch.no_grad():
        return or_else(NAME, lambda: _read(made, asked, statistics), lambda: None)


def _why_tiles(call: Call) -> str | None:
    """The reason why the kernel cannot take a call; None if it can."""
    sizes = call.sizes
    if not isinstance(call.normalization, Softmax) or call.score.dot_scale(call.query.shape[-1]) is None:
        return f"the kernel reads a softmax of dot products, not {call.normalization} of {call.score}"
    if call.query.dtype not in DTYPES:
        return f"the kernel has no {call.query.dtype}"
    if call.bias is not None:
        return "the kernel has no bias"
    if sizes.queries < FEWEST_QUERIES:
        return f"{sizes.queries} queries are fewer than a block of the kernel, {FEWEST_QUERIES}"
    if call.query.shape[-1] > WIDEST:
        return f"a width of {call.query.shape[-1]} is above {WIDEST}"
    if RowRanges.of(call.mask, sizes, call.query.device) is None:
        return f"under the mask ({call.mask}) the keys of a query are not one range"
    return None


def _wanted(statistics: Sequence[Statistic]) -> Wanted | None:
    """The answers for these statistics; None if the kernel lacks one of them."""
    wanted = Wanted.of(statistics)
    if wanted is None or wanted.offset is not None or wanted.chosen:
        return None
    names_zeros = any(isinstance(one, st.ArgLargest | st.TopWeights) and one.names_zeros for one in statistics)
    return None if names_zeros else wanted


def _read(made: SoftmaxCall, asked: Wanted, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]] | None:
    from regard.maps.loop import triton_rows

    call, grid = made.call, asked.grid
    sizes, device, scale = call.sizes, call.query.device, call.score.dot_scale(call.query.shape[-1])
    ranges = RowRanges.of(call.mask, sizes, device)
    assert ranges is not None, "it was asked"
    assert scale is not None, "it was asked"
    query, key = (row_contiguous(t) for t in (call.query, call.key))
    flat_heads, queries, keys = sizes.flat_batch * sizes.heads, sizes.queries, sizes.keys
    finds = made.state is None
    state = torch.empty(1, device=device) if made.state is None else made.state.flatten(0, 1).float()
    # A row without keys has any state; its weights are not visible.
    state = (state / math.log(2)).masked_fill(state == -torch.inf, 0.0).contiguous()
    received = torch.zeros(flat_heads, keys, device=device)
    width = query.shape[-1]
    rows, columns, wide, warps = tile_of(width, query.dtype)
    programs = flat_heads * -(-queries // rows)
    parts = 1 if finds else parts_of(programs, keys)
    entropy = torch.empty(parts, flat_heads, queries, device=device)
    places = 1 << (asked.ranked - 1).bit_length() if asked.ranked else 0
    best = torch.empty(flat_heads, queries, parts, places, dtype=torch.int64, device=device)
    blocks = (1, 1) if grid is None else (grid.rows.count, grid.columns.count)
    lengths = (1, 1) if grid is None else (grid.rows.length, grid.columns.length)
    sums = torch.zeros(flat_heads, *blocks, device=device)
    peaks = torch.zeros_like(sums)
    keep = ranges.first if ranges.keep is None else ranges.keep.to(torch.uint8)
    triton_rows.read_rows[(programs, parts)](
        query, key, state, ranges.first, ranges.stop, keep, received, entropy, best, sums, peaks,
        scale / math.log(2), sizes.heads, call.group, queries, keys, width,
        *query.stride()[:3], *key.stride()[:3], *(0 if len(t) == 1 else t.stride(0) for t in (ranges.first, keep)),
        *lengths, *blocks,
        HAS_KEEP=ranges.keep is not None, FINDS_STATE=finds, RANKED=places, POOLED=grid is not None,
        WIDENS=device.type == "cpu", ROWS=rows, COLUMNS=columns, WIDTH=wide, num_warps=warps,
    )  # fmt: skip
    entropy = entropy.sum(0) if parts > 1 else entropy[0]
    # A value that is not finite makes its row's entropy so. This synchronises, as would reading any answer.
    if not bool(entropy.isfinite().all()):
        return None
    best = best.flatten(-2).sort(-1, descending=True).values[..., : asked.ranked]
    answers = _Answers(received, entropy, best, sums, peaks)
    return [answers.answer(statistic) for statistic in statistics]


def parts_of(programs: int, keys: int) -> int:
    """The number of parts of the keys of a block of queries, for few queries of many keys to fill a GPU.

    >>> parts_of(32, 1 << 20), parts_of(4096, 8192)
    (32, 1)
    """
    return max(1, min(ENOUGH_PROGRAMS // programs, keys // SHORTEST_PART))


def tile_of(width: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """The rows and columns of a block of the program, the padded width (a power of 2), and its warps.

    Compiled for compute capability 9.0, blocks of this size need hardly more registers than there are.

    >>> tile_of(80, torch.bfloat16), tile_of(80, torch.float32)
    ((64, 32, 128, 4), (32, 32, 128, 8))
    """
    wide = max(16, 1 << (width - 1).bit_length())
    if dtype == torch.float32:
        return 32, 32, wide, 8
    return (64, 32, wide, 4) if wide <= 128 else (32, 32, wide, 4)


@dataclass(frozen=True, slots=True, eq=False)
class _Answers:
    received: Tensor
    entropy: Tensor
    best: Tensor
    sums: Tensor
    peaks: Tensor

    def answer(self, statistic: Statistic) -> tuple[Tensor, ...]:
        match statistic:
            case st.Received():
                return (self.received,)
            case st.Entropy():
                return (self.entropy,)
            case st.Largest():
                return (self._ranked(1)[0][..., 0],)
            case st.ArgLargest():
                return (self._ranked(1)[1][..., 0],)
            case st.TopWeights(k):
                return self._ranked(k)
            case st.Pooled(grid, how):
                blocks = self.peaks if how == "max" else self.sums
                return (blocks / grid.areas(blocks.device) if how == "mean" else blocks,)
        raise AssertionError(statistic)

    def _ranked(self, k: int) -> tuple[Tensor, Tensor]:
        best = self.best[..., :k]
        there = best >= 0
        values = (best >> KEY_BITS).to(torch.int32).view(torch.float32)
        return values.masked_fill(~there, 0.0), (LAST_KEY - (best & LAST_KEY)).masked_fill(~there, -1)
