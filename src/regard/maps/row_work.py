"""What the loop over rows is told: one record with the sizes of a map and the addresses of its arrays.

Compiled code that several threads start at once takes one pointer, so that everything is in one record.
"""

from typing import Any

import numpy as np

_COUNTS = (
    "batch", "heads", "key_heads", "queries", "keys", "depth", "panel_count", "ranked", "pieces", "row_bins",
    "column_bins", "sum_bins", "peak_bins", "tile_count", "is_first",
)  # fmt: skip
_STRIDES = (
    "query_batch_stride", "query_head_stride", "query_stride", "key_batch_stride", "key_head_stride", "key_stride",
)  # fmt: skip
_ADDRESSES = (
    "counter", "not_finite", "query", "key", "panels", "lse", "state", "added", "tiles", "piece_edges", "row_edges",
    "column_edges", "row_shares", "column_shares", "received", "entropy", "top", "places", "sums", "peaks", "misses",
)  # fmt: skip
FIELDS = (*_COUNTS, *_STRIDES, *_ADDRESSES, "scale")
WORK = np.dtype([(name, np.int64) for name in FIELDS[:-1]] + [(FIELDS[-1], np.float32)], align=True)
"""Counts, strides in numbers, addresses in bytes, and the scale of the scores to base 2.

    is_first            whether these are the first tiles, so that the answers hold nothing yet
    counter             the next share that no thread has taken
    not_finite          a number that is not 0 after the preparation if a query, a key or a state is NaN or infinite
    query, key          (batch, heads, queries, depth) and (batch, key_heads, keys, depth), float32
    panels              the keys as (batch, key_heads, panel_count, depth, PANEL)
    lse                 (batch, heads, queries), the log-sum-exp, -inf for a row with no key
    state               the same to base 2, and NEVER for such a row
    added               what is added to scores, in the order of the tiles
    piece_edges         where the pieces begin into which rows are shared out
    row_edges, column_edges   where the bins of the picture begin
    row_shares, column_shares   what the sum of a block is multiplied by: 1 / size of its bins for means, 1 for sums
    misses              (cells,), how far the sum of the last query's weights is from 1: |ln of it|
    received            (cells, pieces, panel_count * PANEL), float64, the sums by key
    entropy             (cells, queries)
    top, places         (cells, queries, ranked), 0 and -1 where fewer weights are larger than 0
    sums                (cells, row_bins, sum_bins), the sums of blocks, so multiplied
    peaks               (cells, row_bins, peak_bins), the largest weights of blocks; both bins are 0 or column_bins
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
"""A few rows, the panels of the keys that they may see, the first panel to whose scores something is added, and where
that begins among the added numbers, with its strides."""


def addresses(**arrays: Any) -> dict[str, int]:
    """The addresses of numpy arrays or tensors, by name."""
    return {
        name: array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr() for name, array in arrays.items()
    }
