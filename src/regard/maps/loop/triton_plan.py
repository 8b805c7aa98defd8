"""The launches for some statistics of one shape of call, and the memory of their answers.

    read_rows      (join_parts)   log-sum-exp, entropy, largest weight, distance, groups of keys for the ranking
    rank_groups                   the k largest weights
    read_columns   (pool_keys)    received, pictures

A plan is decided from shapes, strides, dtypes and the kind of the mask alone, and kept.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.call.masks.row_spans import RowRanges
from regard.call.shapes import Sizes
from regard.maps.sources.source import Statistic
from regard.maps.statistics import definitions as st
from regard.maps.statistics.asked import Asked
from regard.tensors.triton_use import Launch

LOG2_E = math.log2(math.e)
ENOUGH_PROGRAMS, SHORTEST_PART = 1024, 2048
"""The programs that fill a GPU, and the fewest keys, or queries, worth a program."""
TOGETHER = 8
"""The most groups of keys that a row keeps in registers; further ones take a further pass."""
SCRATCH = 1 << 26
"""The most elements of sums by bins of queries; more heads take turns."""
ALIGNED = 4
"""Answers begin at multiples of so many elements, 16 bytes."""
Strides = tuple[int, ...]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class KernelTile:
    """The rows and columns of a block of a program, in (T, S), its warps and the blocks that are loaded ahead."""

    rows: int
    columns: int
    warps: int
    stages: int = 3


RANK_TILE = KernelTile(4, 32, 4)
"""The queries and the keys that `rank_groups` looks at together."""


def row_tile(width: int, dtype: torch.dtype, queries: int, card: tuple[int, int]) -> KernelTile:
    """The blocks of `read_rows`: those of the fewest cycles by `tests.gpu.sass`, of the candidates that do not spill.

    >>> row_tile(128, torch.bfloat16, 8192, (9, 0)), row_tile(128, torch.bfloat16, 8192, (8, 0)).warps
    (KernelTile(rows=128, columns=64, warps=4, stages=3), 8)
    """
    if dtype == torch.float32:
        return KernelTile(32, 32, 8, 2)
    # A product that a warp waits for takes registers for its factors.
    rows, warps = min(128 if width <= 128 else 64, _power(queries)), 4 if _is_asynchronous(card) else 8
    # Wider blocks, loaded ahead, do not fit the shared memory of desktops.
    return KernelTile(rows, 64, warps, 3) if width <= 128 else KernelTile(rows, 32, warps, 2)


def column_tile(
    width: int, dtype: torch.dtype, queries: int, card: tuple[int, int], *, has_peaks: bool = False
) -> KernelTile:
    """The blocks of `read_columns` for bins of so many queries, with maxima if `has_peaks`.

    >>> column_tile(128, torch.bfloat16, 8192, (9, 0)), column_tile(128, torch.bfloat16, 9, (9, 0)).rows
    (KernelTile(rows=64, columns=128, warps=4, stages=3), 16)
    """
    if dtype == torch.float32:
        return KernelTile(min(32, _power(queries)), 32, 8, 2)
    # Maxima of larger blocks do not fit the registers of Blackwell, whose powers bind both alike.
    rows = min(32 if has_peaks and card[0] == 10 else 64, _power(queries))
    return KernelTile(rows, 128 if width <= 128 else 64, 4, 3 if width <= 128 else 2)


def _is_asynchronous(card: tuple[int, int]) -> bool:
    """Whether tensor cores read shared memory by themselves: of Hopper, and of Blackwell in data centres."""
    return card[0] in (9, 10)


def _power(count: int) -> int:
    """The power of two that holds a count, 16 at least."""
    return max(16, 1 << (count - 1).bit_length())


def parts_of(programs: int, length: int) -> int:
    """The number of parts of the keys of a block of queries, for few queries of many keys to fill a GPU.

    >>> parts_of(32, 1 << 20), parts_of(4096, 8192)
    (32, 1)
    """
    return max(1, min(ENOUGH_PROGRAMS // programs, length // SHORTEST_PART))


@dataclass(frozen=True, slots=True)
class CallForm:
    sizes: Sizes
    width: int
    dtype: torch.dtype
    strides: tuple[Strides, ...]
    """Of the queries, the keys, the first and the last ends of rows, the flags of keys; () for a missing one.
    A dimension of one sequence has the stride 0.
    """
    lower: int
    upper: int
    scale: float
    cap: float | None
    """The soft cap of the scores; None for none."""
    slopes: tuple[int, int] | None
    """The stride of the slopes of ALiBi, and the place of the first query there; None for none."""
    has_state: bool
    """Whether the log-sum-exp is known."""
    sinks: tuple[int, int] | None
    """The strides of the sinks (B, H); None for none."""
    card: tuple[int, int]
    """The compute capability."""
    is_interpreted: bool

    @classmethod
    def strides_of(cls, query: Tensor, key: Tensor, ranges: RowRanges) -> tuple[Strides, ...]:
        found = [query.stride()[:3], key.stride()[:3]]
        for one in (ranges.first, ranges.stop, ranges.keep):
            found.append(() if one is None else (0 if len(one) == 1 else one.stride(0), one.stride(1)))
        return tuple(found)


def reads_rows(asked: Asked) -> bool:
    return bool(asked.kinds & {st.Entropy, st.Largest, st.ArgLargest, st.TopWeights, st.Distance})


class Memory:
    def __init__(self, **shapes: tuple[tuple[int, ...], torch.dtype]) -> None:
        self._counts: dict[torch.dtype, int] = {}
        self._views: list[tuple[str, torch.dtype, tuple[tuple[int, ...], list[int], int]]] = []
        for name, (shape, dtype) in shapes.items():
            start, strides = self._counts.get(dtype, 0), [math.prod(shape[place + 1 :]) for place in range(len(shape))]
            self._counts[dtype] = start + -(-math.prod(shape) // ALIGNED) * ALIGNED
            self._views.append((name, dtype, (shape, strides, start)))

    def made(self, device: torch.device) -> dict[str, Tensor]:
        whole = {dtype: torch.empty(count, dtype=dtype, device=device) for dtype, count in self._counts.items()}
        return {name: whole[dtype].as_strided(*place) for name, dtype, place in self._views}


class LaunchPlan:
    def __init__(self, form: CallForm, asked: Asked) -> None:
        from regard.maps.loop import triton_columns, triton_rows

        sizes, number, whole, names = form.sizes, torch.float32, torch.int32, asked.kinds
        flat_heads, queries, keys = sizes.flat_batch * sizes.heads, sizes.queries, sizes.keys
        self.form, self.asked, self.finds_rows = form, asked, reads_rows(asked) or not form.has_state
        self._scale = form.scale * LOG2_E
        per_row = (flat_heads, queries), number
        answers: Shapes = {name: per_row for name, kind in PER_ROW.items() if kind in names}
        scratch: Shapes = {name: per_row for name in ("lse", *PER_ROW) if name not in answers}
        self.launches: list[Launch] = []
        self.sums_are_received = False
        self.chunks: list[tuple[int, int, Launch, Launch | None]] = []
        if asked.ranked:
            answers |= {name: ((flat_heads, queries, asked.ranked), dtype) for name, dtype in
                        (("values", number), ("places", torch.int64))}  # fmt: skip
        if self.finds_rows:
            tile = row_tile(form.width, form.dtype, queries, form.card)
            blocks = flat_heads * -(-queries // tile.rows)
            parts = parts_of(blocks, keys)
            together = min(asked.ranked, TOGETHER)
            passes = -(-asked.ranked // TOGETHER) if asked.ranked else 1
            groups = 4 if together > 4 else 8
            count = passes * parts * together
            scratch |= {
                "partial": ((parts if parts > 1 else 0, 4, flat_heads, queries), number),
                "group_values": ((flat_heads, queries, count), number),
                "groups": ((flat_heads, queries, count), whole),
            }
            fixed = {
                "HAS_SINKS": form.sinks is not None, "ENTROPY": st.Entropy in names, "DISTANCE": self._distance(),
                "RANKED": together, "GROUPS": groups, "IN_PARTS": parts > 1,
            }  # fmt: skip
            for one in range(passes):
                self._add(
                    triton_rows.read_rows, (blocks, parts), tile, offset=asked.offset or 0, group_count=count,
                    begun=one * parts * together, LATER=one > 0, **fixed,
                )  # fmt: skip
            if parts > 1:
                rows = 16
                self._add(
                    triton_rows.join_parts, (-(-flat_heads * queries // rows), 1), KernelTile(rows, 1, 4),
                    rows_in_all=flat_heads * queries, parts=parts, PARTS=1 << (parts - 1).bit_length(), **fixed,
                )  # fmt: skip
            if asked.ranked:
                few = RANK_TILE
                self._add(
                    triton_rows.rank_groups, (flat_heads * -(-queries // few.rows), 1), few, group_count=count,
                    ranked=asked.ranked, SIZE=tile.columns // groups, PLACES=1 << (asked.ranked - 1).bit_length(),
                    FEW=few.columns, DIMS=64,
                )  # fmt: skip
        if st.Received in names or asked.grid is not None:
            grid = asked.grid
            has_peaks = "max" in asked.pictures
            longest = queries if grid is None else grid.rows.largest
            tile = column_tile(form.width, form.dtype, longest, form.card, has_peaks=has_peaks)
            blocks = -(-keys // tile.columns)
            bins = parts_of(flat_heads * blocks, queries) if grid is None else grid.rows.count
            heads = max(1, min(flat_heads, SCRATCH // (bins * keys * (1 + has_peaks))))
            parts = max(1, min(bins, ENOUGH_PROGRAMS // (heads * blocks)))
            # Without bins, and without turns, the sums are the answer.
            self.sums_are_received = bins == 1 and heads == flat_heads and st.Received in names
            if not self.sums_are_received:
                scratch["sums"] = (heads, bins, keys), number
            if has_peaks:
                scratch["peaks"] = (heads, bins, keys), number
            answers |= {"received": ((flat_heads, keys), number)} if st.Received in names else {}
            if grid is not None:
                picture = (flat_heads, grid.rows.count, grid.columns.count), number
                answers |= {f"pooled_{how}": picture for how in asked.pictures}
            for first in range(0, flat_heads, heads):
                several = min(heads, flat_heads - first)
                read = self._made(
                    triton_columns.read_columns, (several * blocks, parts), tile, bins=bins,
                    bins_of_part=-(-bins // parts), first_head=first, PEAKS=has_peaks,
                )  # fmt: skip
                pool = None
                if grid is not None:
                    pool = self._made(
                        triton_columns.pool_keys, (several * bins, -(-grid.columns.count // 16)), KernelTile(1, 1, 4),
                        row_bins=bins, column_bins=grid.columns.count, largest_bin=grid.columns.largest,
                        first_head=first, SUM="sum" in asked.pictures, MEAN="mean" in asked.pictures, MAX=has_peaks,
                        BINS=16, KEYS=min(64, 1 << (grid.columns.largest - 1).bit_length()),
                    )  # fmt: skip
                self.chunks.append((first, several, read, pool))
        self.answers, self.scratch = Memory(**answers), Memory(**scratch)

    def _distance(self) -> str:
        offset = self.asked.offset
        return "" if offset is None else "before" if self.form.upper <= offset + 1 else "both"

    def _add(self, *launch: Any, **told: Any) -> None:
        self.launches.append(self._made(*launch, **told))

    def _made(self, program: Any, grid: tuple[int, int], tile: KernelTile, **told: Any) -> Launch:
        form, sizes = self.form, self.form.sizes
        query, key, first, stop, keep = (one or (0, 0) for one in form.strides)
        wide = _power(form.width)
        cap, sinks = 1.0 if form.cap is None else form.cap, form.sinks or (0, 0)
        named = {
            "scale": self._scale if form.cap is None else form.scale / cap, "cap": cap * LOG2_E,
            "heads": sizes.heads, "group": sizes.heads // sizes.kv_heads, "queries": sizes.queries,
            "keys": sizes.keys, "width": form.width,
            **dict(zip(("query_batch", "query_head", "query_row"), query, strict=True)),
            **dict(zip(("key_batch", "key_head", "key_row"), key, strict=True)),
            "first_batch": first[0], "first_row": first[1], "stop_batch": stop[0], "stop_row": stop[1],
            "keep_batch": keep[0], "slope_head": 0 if form.slopes is None else form.slopes[0],
            "bias_offset": 0 if form.slopes is None else form.slopes[1], "lower": form.lower, "upper": form.upper,
            "sink_batch": sinks[0], "sink_head": sinks[1],
            "HAS_FIRST": bool(form.strides[2]), "HAS_STOP": bool(form.strides[3]), "HAS_KEEP": bool(form.strides[4]),
            "CAPPED": form.cap is not None, "SLOPED": form.slopes is not None, "EXACT": wide == form.width,
            "WIDENS": form.is_interpreted, "ROWS": tile.rows, "COLUMNS": tile.columns, "WIDTH": wide,
            "STAGES": tile.stages, **told,
        }  # fmt: skip
        return Launch(program, grid, named, tile.warps)

    def run(self, device: torch.device, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The answers (flat_heads, ...) by name. `given` has query and key, the log-sum-exp to base 2 if it is known,
        and first, stop, keep, slopes and sinks, if there are such."""
        answers, scratch = self.answers.made(device), self.scratch.made(device)
        # A program never reads a tensor that it is not told to read.
        anything = dict.fromkeys(_MAYBE, scratch["lse"])
        tensors = {**anything, **answers, **scratch, **given}
        if self.sums_are_received:
            tensors["sums"] = answers["received"]
        for launch in self.launches:
            launch(tensors)
        for first, several, read, pool in self.chunks:
            read(tensors)
            if pool is not None:
                pool(tensors)
            if "received" in answers and not self.sums_are_received:
                torch.sum(scratch["sums"][:several], 1, out=answers["received"][first : first + several])
        return answers


PER_ROW: dict[str, type[Statistic]] = {"entropy": st.Entropy, "largest": st.Largest, "distance": st.Distance}
_MAYBE = ("first", "stop", "keep", "slopes", "sinks", "sums", "peaks", "pooled_sum", "pooled_mean", "pooled_max")


@lru_cache(maxsize=64)
def plan_of(form: CallForm, asked: Asked) -> LaunchPlan:
    return LaunchPlan(form, asked)
