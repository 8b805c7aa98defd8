"""The usual statistics of softmax weights by one loop over each row of scores, if numba is installed.

`regard.maps.tiles` reads a tile of weights once for each statistic. The loop of `regard.maps.row_loop` makes the
weights of a row and reads them while they are in the processor's cache, which takes about as long as the fused kernel
that the attention itself ran. The products of queries and keys are torch's, and as many threads as torch has share the
cells.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.backends.base import Call
from regard.backends.tiled import Tile
from regard.maps import statistics as st
from regard.maps.pooling import Grid
from regard.maps.source import ScorePart, Scratch, Source, Statistic
from regard.maps.tile_groups import groups
from regard.mechanisms.normalizations import Softmax
from regard.mechanisms.transforms import can_look, in_forward_mode

SMALL = 1 << 20
"""Maps with fewer weights than this go by tiles: to load numba takes longer than they do."""
MOST_RANKED = 64
"""For more keys of each query than this, torch's selection is faster."""


@cache
def is_installed() -> bool:
    """Whether numba is there; it is not imported."""
    return find_spec("numba") is not None


def _is_worth_it(dtype: torch.dtype, weights: int) -> bool:
    return dtype == torch.float32 and weights >= SMALL


def said_of(call: Call) -> str | None:
    """What `explain` says of the statistics of a call's weights; None if the loop has nothing to do with them."""
    sizes = call.sizes
    weights = sizes.flat_batch * sizes.heads * sizes.queries * sizes.keys
    is_dot = isinstance(call.normalization, Softmax) and call.score.dot_scale(call.query.shape[-1]) is not None
    if not is_dot or call.query.device.type != "cpu" or not _is_worth_it(call.compute_dtype, weights):
        return None
    loop = "by one loop over each row"
    return loop if is_installed() else f"by tiles; with numba (pip install 'regard[fast]') {loop}"


def in_one_loop(source: Source, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]] | None:
    """The answers (cells, ...) of several statistics, as `regard.maps.tiles.one_pass` gives them.

    Returns None if they are not all among those of the loop, if the weights are not a softmax of dot products in
    float32 on the CPU, if a gradient is asked, or if a number is not finite: then tiles answer.
    """
    wanted = _Wanted.of(statistics)
    if wanted is None or not _is_worth_it(source.dtype, math.prod(source.shape)) or not is_installed():
        return None
    if in_forward_mode():
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in source.tensors()):
        return None
    if not all(map(can_look, source.tensors())):
        return None
    with torch.no_grad():
        return _read(source, wanted, statistics)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the loop is to find."""

    ranked: int
    """k: how many of the largest weights of each query."""
    grid: Grid | None
    """The blocks of the one picture."""

    @classmethod
    def of(cls, statistics: Sequence[Statistic]) -> "_Wanted | None":
        """What these statistics need; None if one of them is not among those of the loop."""
        ranked, grids = 0, set[Grid]()
        for statistic in statistics:
            match statistic:
                case st.Received() | st.Entropy():
                    pass
                case st.Largest() | st.ArgLargest():
                    ranked = max(ranked, 1)
                case st.TopWeights(k):
                    ranked = max(ranked, k)
                case st.Pooled(grid):
                    grids.add(grid)
                case _:
                    return None
        if ranked > MOST_RANKED or len(grids) > 1:
            return None
        return cls(ranked, next(iter(grids), None))


class _Answered:
    """The memory for the answers of all cells, and the tile reader that fills it."""

    def __init__(self, source: Source, wanted: _Wanted) -> None:
        cells, queries, keys, grid = source.cells, source.queries, source.keys, wanted.grid
        self.received = np.zeros((cells, keys), np.float64)
        self.entropy = np.zeros((cells, queries), np.float32)
        self.values = np.zeros((cells, queries, wanted.ranked), np.float32)
        self.places = np.full((cells, queries, wanted.ranked), -1, np.int64)
        blocks = (0, 0) if grid is None else (grid.rows.count, grid.columns.count)
        self.sums, self.peaks = (np.zeros((cells, *blocks), np.float32) for _ in range(2))
        cpu = torch.device("cpu")
        self._row_bins = np.zeros(queries, np.int64) if grid is None else grid.rows.owners(cpu).numpy()
        self._edges = np.array(
            [] if grid is None else [grid.columns.edge(b) for b in range(grid.columns.count + 1)], np.int64
        )

    def read(self, scores: Any, state: Any, cells: slice, tile: Tile) -> None:
        """Read the scores (cells, t, s) of some cells of a tile, which it overwrites."""
        from regard.maps.row_loop import DEPTH, LANES, read_tile

        length = scores.shape[2]
        answers = (self.received, self.entropy, self.values, self.places, self.sums, self.peaks)
        read_tile(
            *(scores, state, tile.rows.start, tile.columns.start, self._row_bins, self._edges),
            *(answer[cells] for answer in answers),
            *(np.empty(length, np.float32), np.empty(length, np.float32)),
            *(np.empty(length // DEPTH + LANES, np.int32), np.empty(self.values.shape[2], np.int64)),
        )

    def answer(self, statistic: Statistic) -> tuple[Tensor, ...]:
        """The answers (cells, ...) of a statistic."""
        match statistic:
            case st.Received():
                return (torch.from_numpy(self.received).float(),)
            case st.Entropy():
                return (torch.from_numpy(self.entropy),)
            case st.Largest():
                return (torch.from_numpy(self.values)[..., 0].clone(),)
            case st.ArgLargest():
                return (torch.from_numpy(self.places)[..., 0].clone(),)
            case st.TopWeights(k):
                # Fewer than were ranked are copied, so that the others are not held in memory.
                return tuple(torch.from_numpy(found)[..., :k].contiguous() for found in (self.values, self.places))
            case st.Pooled(grid, how):
                blocks = torch.from_numpy(self.peaks if how == "max" else self.sums)
                return (blocks / grid.areas(blocks.device) if how == "mean" else blocks,)
        raise AssertionError(statistic)


def _read(source: Source, wanted: _Wanted, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]] | None:
    scratch, threads = Scratch(), torch.get_num_threads()
    found = _Answered(source, wanted)
    with ThreadPoolExecutor(threads - 1) if threads > 1 else nullcontext() as pool:
        for cells, cuts in groups(source, at_once=threads):
            part = source.score_part(cells, scratch)
            if part is None or not part.is_finite:
                return None
            for rows in cuts:
                _share_out(found, part, Tile(cells, rows, source.columns(rows)), pool, threads)
    return [found.answer(statistic) for statistic in statistics]


def _share_out(found: _Answered, part: ScorePart, tile: Tile, pool: ThreadPoolExecutor | None, threads: int) -> None:
    """Read a tile; each thread takes some of its cells."""
    if not tile.columns:
        return
    scores, state = part.scores(tile.rows, tile.columns).numpy(), part.state.numpy()
    count, first = len(tile.cells), tile.cells.start
    cuts = pairwise(sorted({count * one // threads for one in range(threads + 1)}))
    jobs = [(slice(start, stop), slice(first + start, first + stop)) for start, stop in cuts]
    waiting = [] if pool is None else [pool.submit(found.read, scores[s], state[s], c, tile) for s, c in jobs[1:]]
    for own, cells in jobs[:1]:
        found.read(scores[own], state[own], cells, tile)
    for one in waiting:
        one.result()
