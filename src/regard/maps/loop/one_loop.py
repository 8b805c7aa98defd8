"""The usual statistics of softmax weights by one loop over rows of scores, if numba is installed.

`regard.maps.statistics.tiles` reads a tile of weights once for each statistic. The loop of `regard.maps.loop.row_loop`
makes the weights of a few rows and reads them while they are in registers and caches: for long rows this is faster than
the fused kernel of the attention itself. As many threads as torch has share flat_heads and rows.
"""

import ctypes
import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.kernels.base import Call
from regard.maps.loop.row_tiles import FIELDS, WORK, addresses, batches_of
from regard.maps.sources.dot_scores import DotScores
from regard.maps.sources.source import Source, Statistic
from regard.maps.statistics import definitions as st
from regard.maps.statistics.asked import Answer, Asked, RowReader
from regard.maps.statistics.definitions import SumsOfKeys
from regard.maps.statistics.pooling import Bins, Grid
from regard.tensors.guards import can_look, in_forward_mode, is_recorded
from regard.tensors.memory import row_contiguous
from regard.tensors.triton_use import has_numba

SMALL = 1 << 20
"""Maps with fewer weights go by tiles: loading numba takes longer."""
SHARES = 4
"""The shares of a thread, if there are not as many flat_heads: rows see different numbers of keys."""


class NumbaRows(RowReader):
    name = "one loop over each row (numba)"
    devices = frozenset({"cpu"})

    def why_not(self, source: Source, asked: Asked) -> str | None:
        weights = math.prod(source.shape)
        if not weights or weights < SMALL:
            return f"its {weights:,} weights are fewer than {SMALL:,}"
        if not has_numba():
            return "numba is not installed (pip install 'regard[fast]')"
        if asked.beyond is not None:
            return asked.beyond
        factors = source.softmax_factors()
        if factors is None or source.dtype != torch.float32:
            return "it reads a softmax of dot products in float32"
        if _scale_of(factors.form) is None:
            return f"{factors.form.score} is no scaled dot product"
        if in_forward_mode() or (is_recorded() and any(one.requires_grad for one in source.tensors())):
            return "it has no gradient"
        return None if all(map(can_look, source.tensors())) else "the elements of a tensor cannot be looked at"

    def read(self, source: Source, asked: Asked) -> list[Answer | None]:
        factors = source.softmax_factors()
        assert factors is not None, "a softmax of dot products"
        with torch.no_grad():
            call, state = factors.read()
            scale = _scale_of(call)
            assert scale is not None, "a scaled dot product"
            found = _read(source, DotScores(call, state, scale), asked)
        if found is None:
            return [None] * len(asked.statistics)
        return list(map(found.answer, asked.statistics))


def _scale_of(call: Call) -> float | None:
    return call.score.dot_scale(call.query.shape[-1])


def _chains(asked: Asked, keys: int) -> list[Any]:
    """The chains of all chosen keys, as arrays (chains, sequences, T) and (chains, sequences, S)."""
    found = [chosen.chains(keys) for chosen in asked.chosen]
    sequences = max((one.first.shape[1] for one in found), default=1)
    parts = ([t.expand(-1, sequences, -1).cpu().numpy() for t in kind] for kind in zip(*found, strict=True))
    return [np.concatenate(part) for part in parts] if found else [np.zeros((0, 1, 0), np.int64)] * 2


PAGE = 4_096
"""Bytes of a page of memory."""


def _half_a_page_from(other: Tensor, shape: tuple[int, ...]) -> Tensor:
    """New float32 memory, 2,048 bytes from `other` modulo 4,096: where they are alike modulo a page, each read waits
    for the write to the other."""
    count = math.prod(shape)
    whole = torch.empty(count + PAGE // 4, dtype=torch.float32, device="cpu")
    first = (other.data_ptr() + PAGE // 2 - whole.data_ptr()) % PAGE // 4
    return whole[first : first + count].view(shape)


class _LoopAnswers:
    def __init__(self, source: Source, wanted: Asked, pieces: int, width: int, chains: int) -> None:
        made = partial(torch.empty, device="cpu")
        flat_heads, queries, grid = source.flat_heads, source.queries, wanted.grid
        self._keys, self._has_sums = source.keys, "sum" in wanted.pictures
        self.received = made((flat_heads, pieces, width), dtype=torch.float64)
        self.entropy = made((flat_heads, queries), dtype=torch.float32)
        self.distance = made((flat_heads, 0 if wanted.offset is None else queries), dtype=torch.float32)
        self.chosen = made((flat_heads, chains, queries), dtype=torch.float32)
        self._chains = iter(self.chosen.unbind(1))
        self.ranked = max(wanted.ranked, st.Largest in wanted.kinds)
        self.top = made((flat_heads, queries, self.ranked), dtype=torch.float32)
        self.places = made((flat_heads, queries, self.ranked), dtype=torch.int64)
        rows, columns = (1, 0) if grid is None else (grid.rows.count, grid.columns.count)
        self.sums = made((flat_heads, rows, columns if wanted.pictures & {"mean", "sum"} else 0), dtype=torch.float32)
        columns = columns if "max" in wanted.pictures else 0
        self.peaks = _half_a_page_from(self.sums, (flat_heads, rows, columns))

    def arrays(self) -> dict[str, Any]:
        names = ("received", "entropy", "distance", "chosen", "top", "places", "sums", "peaks")
        return {name: getattr(self, name) for name in names}

    def answer(self, statistic: Statistic) -> Answer:
        match statistic:
            case st.Distance():
                return (self.distance,)
            case SumsOfKeys():
                return tuple(islice(self._chains, statistic.count))
            case st.Received():
                whole = self.received[:, 0] if self.received.shape[1] == 1 else self.received.sum(1)
                return (whole[:, : self._keys].float(),)
            case st.Entropy():
                return (st.without_rounding(self.entropy),)
            case st.Largest():
                return (self.top[..., 0].clone(),)
            case st.ArgLargest():
                return (self.places[..., 0].clone(),)
            case st.TopWeights(k):
                # Copy the k of all ranked ones, to free the others.
                return self.top[..., :k].contiguous(), self.places[..., :k].contiguous()
            case st.Pooled(grid, how):
                blocks = self.peaks if how == "max" else self.sums
                return (blocks / grid.areas(blocks.device) if how == "mean" and self._has_sums else blocks,)
        raise AssertionError(statistic)


def _read(source: Source, scores: DotScores, wanted: Asked) -> _LoopAnswers | None:
    from regard.maps.loop.row_loop import prepare, read_rows
    from regard.tensors.vector_code import PANEL

    threads, grid = torch.get_num_threads(), wanted.grid
    pieces = 1 if source.flat_heads >= SHARES * threads else -(-SHARES * threads // source.flat_heads)
    panels, has_sums = -(-source.keys // PANEL), "sum" in wanted.pictures
    query, key = (row_contiguous(t) for t in (scores.query, scores.key))
    first, following = _chains(wanted, source.keys)
    found = _LoopAnswers(source, wanted, pieces, panels * PANEL, len(first))
    arrays = {
        **found.arrays(),
        "counter": np.zeros(1, np.int64),
        "not_finite": np.zeros(1, np.int64),
        "query": query,
        "key": key,
        # By torch, whose memory begins at a cache line: numpy's does so by chance.
        "panels": key.new_empty(*key.shape[:2], panels, key.shape[3], PANEL),
        "lse": (lse := scores.state.contiguous()),
        "state": torch.empty_like(lse),
        "chain_first": first,
        "chain_following": following,
        "piece_edges": _piece_edges(source.queries, pieces, grid),
        "row_edges": np.array([0, source.queries]) if grid is None else _edges(grid.rows),
        "column_edges": np.zeros(1, np.int64) if grid is None else _edges(grid.columns),
        "row_shares": np.ones(1, np.float32) if grid is None else _shares(grid.rows, has_sums),
        "column_shares": np.ones(0, np.float32) if grid is None else _shares(grid.columns, has_sums),
    }
    told = {
        **addresses(**arrays), "batch": query.shape[0], "heads": query.shape[1], "key_heads": key.shape[1],
        "queries": source.queries, "keys": source.keys, "depth": query.shape[3], "panel_count": panels,
        "ranked": found.ranked, "pieces": pieces, "row_bins": found.sums.shape[1],
        "column_bins": 0 if grid is None else grid.columns.count,
        "has_distance": wanted.offset is not None, "offset": wanted.offset or 0, "chains": len(first),
        "sequences": first.shape[1], "sum_bins": found.sums.shape[2], "peak_bins": found.peaks.shape[2],
        **_strides("query", query), **_strides("key", key), "scale": scores.scale,
    }  # fmt: skip
    work = np.array([tuple(told.get(name, 0) for name in FIELDS)], WORK)
    run_in_threads(prepare, work.ctypes.data, threads)
    if arrays["not_finite"][0]:
        return None
    for number, (tiles, added) in enumerate(batches_of(source, scores, PANEL)):
        places = addresses(tiles=tiles, added=added)
        work["is_first"] = number == 0
        work["tiles"], work["tile_count"], work["added"] = places["tiles"], len(tiles), places["added"]
        arrays["counter"][:] = 0
        run_in_threads(read_rows, work.ctypes.data, threads)
    return found


def _strides(name: str, tensor: Tensor) -> dict[str, int]:
    batch, head, row, _ = tensor.stride()
    return {f"{name}_batch_stride": batch, f"{name}_head_stride": head, f"{name}_stride": row}


@lru_cache
def _edges(bins: Bins) -> Any:
    size, extra = divmod(bins.length, bins.count)
    index = np.arange(bins.count + 1, dtype=np.int64)
    return index * size + np.minimum(index, extra)


@lru_cache
def _shares(bins: Bins, has_sums: bool) -> Any:
    """The factors of sums: 1, or 1 / size of the bin for means."""
    sizes = np.diff(_edges(bins))
    return np.ones(bins.count, np.float32) if has_sums else (1 / sizes).astype(np.float32)


@lru_cache
def _piece_edges(queries: int, pieces: int, grid: Grid | None) -> Any:
    places = [queries * piece // pieces for piece in range(pieces)]
    if grid is not None:
        places = [grid.rows.edge(grid.rows.index_of(place)) for place in places]
    return np.array([*places, queries], np.int64)


def run_in_threads(function: Any, argument: int, threads: int) -> None:
    """Call a compiled function in several threads, this one among them, and wait for all of them.

    Its `address` is that of a C function of one pointer, the argument. It divides its work itself. OpenMP's threads
    spin for a while after an operation, so other threads would compete with them for the processor: `GOMP_parallel`
    starts them from code compiled by gcc, and LLVM's OpenMP has it too. The fallback is Python's threads.
    """
    team = openmp() if threads > 1 else None
    if team is not None:
        team(function.address, argument, threads, 0)
        return
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.address)
    if threads == 1:
        called(argument)
    else:
        with ThreadPoolExecutor(threads - 1) as pool:
            others = [pool.submit(called, argument) for _ in range(threads - 1)]
            called(argument)
        for other in others:
            other.result()


@cache
def openmp() -> Any:
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return found
