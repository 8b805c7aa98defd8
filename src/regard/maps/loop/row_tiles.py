"""The input of the loop over rows: one record of sizes and addresses, and the tiles with their masks and biases.

Compiled code on several threads takes one pointer, so everything is in one record.
"""

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.maps.sources.dot_scores import NEVER, DotScores
from regard.maps.sources.source import Source
from regard.tensors.tile_sizes import fitting, ranges

_COUNTS = (
    "batch", "heads", "key_heads", "queries", "keys", "depth", "panel_count", "ranked", "pieces", "row_bins",
    "column_bins", "sum_bins", "peak_bins", "has_distance", "offset", "chains", "sequences", "tile_count", "is_first",
)  # fmt: skip
_STRIDES = (
    "query_batch_stride", "query_head_stride", "query_stride", "key_batch_stride", "key_head_stride", "key_stride",
)  # fmt: skip
_ADDRESSES = (
    "counter", "not_finite", "query", "key", "panels", "lse", "state", "added", "tiles", "piece_edges", "row_edges",
    "column_edges", "row_shares", "column_shares", "chain_first", "chain_following", "received", "entropy", "distance",
    "chosen", "top", "places", "sums", "peaks",
)  # fmt: skip
FIELDS = (*_COUNTS, *_STRIDES, *_ADDRESSES, "scale")
WORK = np.dtype([(name, np.int64) for name in FIELDS[:-1]] + [(FIELDS[-1], np.float32)], align=True)
"""Counts, strides in elements, addresses in bytes, and the scale of the scores to base 2.

    is_first            whether these are the first tiles, so that the answers hold nothing yet
    counter             the next share that no thread has taken
    not_finite          not 0 after the preparation if a query, a key or a state is NaN or infinite
    query, key          (batch, heads, queries, depth) and (batch, key_heads, keys, depth), float32
    panels              the keys as (batch, key_heads, panel_count, depth, PANEL)
    lse                 (batch, heads, queries), the log-sum-exp, -inf for a row with no key
    state               the same to base 2, and NEVER for such a row
    added               the additions to the scores, in the order of the tiles
    piece_edges         where the pieces begin into which rows are shared out
    row_edges, column_edges   where the bins of the picture begin
    row_shares, column_shares   the factors of the sum of a block: 1 / size of its bins for means, 1 for sums
    chain_first         (chains, sequences, queries), the first of the chosen keys of each query; -1 is the end
    chain_following     (chains, sequences, keys), of each key the next one, which is smaller
    received            (flat_heads, pieces, panel_count * PANEL), float64, the sums by key
    entropy             (flat_heads, queries)
    distance            (flat_heads, queries) if has_distance: sums of w |query + offset - key|
    chosen              (flat_heads, chains, queries), the sums of the weights on the chosen keys
    top, places         (flat_heads, queries, ranked), 0 and -1 where fewer weights are larger than 0
    sums                (flat_heads, row_bins, sum_bins), the sums of blocks, so multiplied
    peaks               (flat_heads, row_bins, peak_bins), the largest weights of blocks; both bins are 0 or column_bins
"""

TILE = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("start", "stop", "first_panel", "stop_panel"),
            *("added_panel", "added", "batch_stride", "head_stride", "row_stride"),
        )
    ]
)
"""A few rows, the panels of their visible keys, the first panel with additions to its scores, and the offset of these,
with its strides.
"""

ADDED_ELEMENTS = 1 << 20
"""The most elements of additions in one run of the loop: 4 MiB of masks and biases."""
MOST_ROWS, FEWEST_ROWS = 64, 8
MOST_KEPT, KEPT_ELEMENTS = 16, 1 << 16
"""The tiles of so many maps are cached for later maps, if their additions are no larger."""

TileBatch = tuple[Any, Tensor]
kept_batches: dict[Hashable, TileBatch] = {}


def addresses(**arrays: Any) -> dict[str, int]:
    return {
        name: array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr() for name, array in arrays.items()
    }


def batches_of(source: Source, scores: DotScores, panel: int) -> Iterable[TileBatch]:
    """Batches with the additions to their scores, which the layers of a model mostly share; the last may be empty."""
    batches = _batches(source, scores, panel)
    if scores.kind is None:
        return batches
    key = (scores.kind, source.queries, source.keys, panel)
    if (known := kept_batches.get(key)) is not None:
        return [known]
    first, *more = islice(batches, 2)
    if not more and first[1].numel() <= KEPT_ELEMENTS:
        for oldest in list(kept_batches)[: max(len(kept_batches) - MOST_KEPT + 1, 0)]:
            kept_batches.pop(oldest, None)
        kept_batches[key] = first
    return chain([first, *more], batches)


def _batches(source: Source, scores: DotScores, panel: int) -> Iterator[TileBatch]:
    most = fitting(2 * ADDED_ELEMENTS, scores.breadth * source.keys, MOST_ROWS)
    step = max(most, FEWEST_ROWS) if scores.reads_queries else max(source.queries, 1)
    tiles, parts, count = list[tuple[int, ...]](), list[Tensor](), 0
    # Under a causal mask or a window, blocks on one diagonal are equal, and made once: offset and strides of each.
    made = dict[tuple[int, ...], tuple[int, ...]]()
    for rows in ranges(source.queries, step):
        columns = source.columns(rows)
        first, stop = columns.start // panel, -(-columns.stop // panel)
        if not columns:
            continue
        # In a causal tile the mask allows most panels in all rows.
        whole = range(columns.stop // panel - first + 1)[1:] if columns.start % panel == 0 else range(0)
        start = first + bisect_left(
            whole, True, key=lambda n: not scores.allows(rows, range(columns.start, columns.start + n * panel))
        )
        added: tuple[int, ...] = (0, 0, 0, 0)
        if start < stop:
            wanted = range(max(columns.start, start * panel), columns.stop)
            edges = (wanted.start, wanted.stop, start * panel, stop * panel)
            place = (len(rows), *(edge - rows.start for edge in edges))
            if not scores.is_relative or place not in made:
                part = _added(scores, rows, wanted, range(start * panel, stop * panel))
                strides = [0 if size == 1 else stride for size, stride in zip(part.shape, part.stride(), strict=True)]
                made[place] = (count, *strides[:3])
                parts.append(part.flatten())
                count += part.numel()
            added = made[place]
        tiles.append((rows.start, rows.stop, first, stop, start, *added))
        if count >= ADDED_ELEMENTS:
            yield np.array(tiles, TILE), torch.cat(parts)
            tiles, parts, count = [], [], 0
            made.clear()
    yield np.array(tiles, TILE), torch.cat([*parts, scores.query.new_zeros(1)])


def _added(scores: DotScores, rows: range, wanted: range, panels: range) -> Tensor:
    block = scores.added(rows, wanted)
    # Always a copy: a bias may have any strides, and one element for all keys.
    part = block.new_full((*block.shape[:3], len(panels)), -NEVER)
    part[..., wanted.start - panels.start : wanted.stop - panels.start] = block
    return part
