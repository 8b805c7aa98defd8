"""One pass over the tiles of a map, shared by every statistic that is asked for.

A tile is a few queries of a few heads against every key that they may see. Its weights exist while the
statistics read it, and are computed again, tile by tile, for a gradient: memory is linear in T and S.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.backends.tiled import Tile
from regard.maps.source import Part, Scratch, Source, Statistic
from regard.mechanisms.tile_sizes import ranges, tile_shape

TILE_ELEMENTS = 1 << 20
"""Numbers that a tile's largest tensor may hold, 4 MiB in float32. Smaller tiles fit the cache better, but more calls
cancel the gain."""
TILE_ROWS = 64
"""Queries below which a tile is rather made of fewer heads: narrow matrix products are slow."""


def ask(source: Source, statistic: Statistic) -> tuple[Tensor, ...]:
    """The answers (cells, ...) of a statistic, without tiles where the source can.

    Raises:
        NotKeptError: neither the answers nor the weights were kept.
    """
    return ask_all(source, [statistic])[0]


def ask_all(source: Source, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]]:
    """The answers of several: in one pass, if some of them need tiles whatever the source is.

    Raises:
        NotKeptError: neither the answers of one nor the weights were kept.
    """
    share = source.has_blocks and len(statistics) > 1 and any(s.needs_tiles for s in statistics)
    answers = [None if share else source.at_once(statistic) for statistic in statistics]
    missing = [s for s, answer in zip(statistics, answers, strict=True) if answer is None]
    if missing and not source.has_blocks:
        source.refuse(", ".join(map(str, missing)))
    found = iter(one_pass(source, missing) if missing else ())
    return [next(found) if answer is None else answer for answer in answers]


def one_pass(source: Source, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]]:
    """Every statistic's answers of shape (cells, ...), from one pass over the tiles."""
    totals: list[Any] = [None for _ in statistics]
    scratch = None if torch.is_grad_enabled() else Scratch()
    for cells, cuts in groups(source):
        part = source.part(cells, scratch)
        for rows in cuts:
            # A reduction needs a key to look at; its weight is 0.
            tile = Tile(cells, rows, source.columns(rows) or range(1))
            found = _read(part, tile, statistics)
            totals = [s.add(t, r, tile, source) for s, t, r in zip(statistics, totals, found, strict=True)]
    return [statistic.end(total) for statistic, total in zip(statistics, totals, strict=True)]


def _read(part: Part, tile: Tile, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]]:
    def read() -> list[tuple[Tensor, ...]]:
        piece = part(tile.rows, tile.columns)
        return [statistic.read(piece, tile) for statistic in statistics]

    if not torch.is_grad_enabled():
        return read()
    # What a tile holds is given up at once and made again in the backward pass.
    return checkpoint(read, use_reentrant=False, preserve_rng_state=False)


def groups(source: Source) -> Iterator[tuple[range, list[range]]]:
    """Cells that make a tile together, and the rows of its tiles: few cells and many rows where both do not fit."""
    count, a_row = source.cells, max(1, source.keys * source.width)
    # Buffers of a small map that were larger would take longer to touch for the first time than to fill.
    limit = min(TILE_ELEMENTS, max(TILE_ELEMENTS // 4, count * source.queries * a_row // 8))
    few, rows = tile_shape(count, source.queries, a_row, budget=limit, few_rows=TILE_ROWS)
    # As many tiles, but of the same number of cells.
    few = max(1, -(-count // max(1, -(-count // few))))
    cuts = list(_cuts(source, few, rows, limit))
    for cells in ranges(count, few):
        yield cells, cuts


def _cuts(source: Source, cells: int, step: int, limit: int) -> Iterator[range]:
    """Rows of tiles, `step` and more where the mask leaves them few keys."""
    start, queries, width = 0, source.queries, source.width
    while start < queries:
        rows = range(start, min(start + step, queries))
        while rows.stop < queries:
            more = range(start, min(start + 2 * len(rows), queries))
            if cells * len(more) * len(source.columns(more)) * width > limit:
                break
            rows = more
        yield rows
        start = rows.stop
