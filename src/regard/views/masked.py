"""The masked cells of a picture, drawn unlike weights of 0."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regard.call.masks.basic import as_mask
from regard.call.shapes import Rows, Sizes, take
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.axes import SelectionSource
from regard.maps.sources.call import CallSource
from regard.maps.sources.derived import DerivedSource
from regard.maps.sources.source import Source
from regard.maps.statistics.pooling import Grid
from regard.watching.kept.mask_reading import HIDDEN

PAIRS = 2**22
"""The most pairs of a mask rendered at a time."""
MOST_PAIRS = 2**27
"""The most pairs of a map whose mask is rendered pair by pair. Larger maps use the key range of each block, which has
no holes."""

Cells = npt.NDArray[np.bool_]


def hidden_cells(weights: Any, grid: Grid, mask: Any = None) -> Cells:
    """The blocks of a map (T, S) without any allowed pair, bool (rows, columns).

    The map of a call has its mask and the blocked pairs of its bias; means and selections combine those of their maps.
    Tensors, arrays and recorded statistics have none, unless `mask` is given.

    >>> import regard
    >>> q = torch.zeros(4, 2)
    >>> causal = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
    >>> hidden_cells(causal, Grid.at_most(2, 2, 4, 4)).tolist()
    [[False, True], [False, False]]
    """
    queries, keys = grid.rows.length, grid.columns.length
    if mask is not None:
        # torch cannot read arrays with negative strides.
        given = as_mask(torch.from_numpy(mask.copy()) if isinstance(mask, np.ndarray) else mask)
        sizes = Sizes((), 1, 1, queries, keys, False)
        assert given is not None
        bound = given.bind(sizes, torch.device("cpu"))
        return _rendered(
            lambda rows: _any(bound.block(rows, range(keys), sizes=sizes, device=torch.device("cpu"))), grid
        )
    nothing = np.zeros((grid.rows.count, grid.columns.count), bool)
    if not isinstance(weights, AttentionMap):
        return nothing
    source = weights.source
    if not source.has_blocks:
        return nothing
    if queries * keys > MOST_PAIRS:
        return _by_ranges(source, grid)
    return _rendered(lambda rows: _allowed(source, rows, range(keys)), grid)


def _rendered(allowed: Any, grid: Grid) -> Cells:
    """The blocks without any allowed pair; `allowed` renders some rows, (t or 1, s or 1)."""
    blocks, keys = grid.rows.ranges(), grid.columns.length
    step = max(1, PAIRS // (keys * grid.rows.largest))
    parts = []
    for first in range(0, len(blocks), step):
        some = blocks[first : first + step]
        rows = range(some[0].start, some[-1].stop)
        seen = allowed(rows).cpu().float().expand(len(rows), keys).contiguous()
        parts.append(grid.reduce(seen, rows.start, 0, largest=True).numpy() == 0)
    return np.concatenate(parts)


def _allowed(source: Source, rows: Rows, columns: Rows) -> Tensor:
    """The pairs allowed in any of the source's heads, bool (t or 1, s or 1)."""
    if isinstance(source, CallSource):
        return _allowed_by_call(source, rows, columns)
    if isinstance(source, SelectionSource):
        return _allowed(source.of, _inner(source.rows, rows), _inner(source.chosen, columns))
    if isinstance(source, DerivedSource) and source.of.shape[-2:] == source.shape[-2:]:
        return _allowed(source.of, rows, columns)
    places = torch.as_tensor(columns)
    ranges = [source.columns(range(row, row + 1)) for row in torch.as_tensor(rows).tolist()]
    return torch.stack([(places >= one.start) & (places < one.stop) for one in ranges])


def _allowed_by_call(source: CallSource, rows: Rows, columns: Rows) -> Tensor:
    call = source.call
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=source.device)
    if call.mask is not None:
        seen = call.allowed(call.mask, rows, columns)
    if call.bias is not None:
        vectors = {"query": take(call.query, rows), "key": take(call.key, columns)}
        seen = seen & (call.bias.block(rows, columns, **vectors, sizes=call.sizes) > HIDDEN)
    return _any(seen)


def _any(seen: Tensor) -> Tensor:
    return seen.flatten(0, -3).any(0)


def _inner(chosen: Rows, wanted: Rows) -> Rows:
    if isinstance(chosen, range) and isinstance(wanted, range):
        return chosen[wanted.start : wanted.stop]
    return torch.as_tensor(chosen)[torch.as_tensor(wanted)]


def _by_ranges(source: Source, grid: Grid) -> Cells:
    hidden = np.ones((grid.rows.count, grid.columns.count), bool)
    for number, rows in enumerate(grid.rows.ranges()):
        seen = source.columns(rows)
        if seen:
            first, last = grid.columns.index_of(seen.start), grid.columns.index_of(seen.stop - 1)
            hidden[number, first : last + 1] = False
    return hidden
