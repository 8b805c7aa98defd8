"""Computation of statistics: directly, by one loop over rows, or in one shared pass over tiles.

A tile has a few queries of a few heads, and all their visible keys. Its weights exist only while the statistics read
it, and are recomputed, tile by tile, for a gradient: memory is linear in T and S.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.call.shapes import without_autocast
from regard.errors import ArgumentError
from regard.kernels.tiled import Tile
from regard.maps.loop.one_loop import in_one_loop
from regard.maps.loop.triton_statistics import in_kernels
from regard.maps.sources.source import Part, Scratch, Source, Statistic
from regard.tensors.guards import is_recorded
from regard.tensors.tile_sizes import ranges, tile_shape
from regard.tensors.triton_use import DEVICES

TILE_ELEMENTS = 1 << 20
"""The most elements of a tile's largest tensor: 4 MiB in float32. Smaller tiles fit the cache better, but more calls
cancel the gain.
"""
TILE_ROWS = 64
"""A tile reduces its heads before it has fewer queries than this, because narrow matrix products are slow."""


def ask(source: Source, statistic: Statistic) -> tuple[Tensor, ...]:
    """The answers (flat_heads, ...) of a statistic, without tiles if possible."""
    return ask_all(source, [statistic])[0]


def ask_all(source: Source, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]]:
    shares = ""
    for one in statistics:
        if one.reads_shares and source.has_signs:
            shares += f", {one}" if shares else str(one)
    if shares:
        raise ArgumentError(
            f"{shares} reads the weights of a query as shares of a whole, and some weights of this map are "
            f"below 0: it is {source}; dense(), received() and map @ x are exact, signs and all"
        )
    device = source.device
    with without_autocast(device):
        by_kernels = in_kernels(source, statistics) if device.type in DEVICES else None
        if by_kernels is not None:
            return by_kernels  # They leave out rounding themselves.
        found, missing = dict[int, tuple[Tensor, ...]](), list[Statistic]()
        share = len(statistics) > 1 and source.has_blocks and any(one.needs_tiles for one in statistics)
        for place, one in enumerate(statistics):
            answer = None if share else source.at_once(one)
            if answer is None:
                missing.append(one)
            else:
                found[place] = answer
        if missing and not source.has_blocks:
            source.refuse(", ".join(map(str, missing)))
        rest = iter((in_one_loop(source, missing) or one_pass(source, missing)) if missing else ())
        for place, one in enumerate(statistics):
            found[place] = one.without_rounding(found[place] if place in found else next(rest))
        return list(map(found.__getitem__, range(len(statistics))))


def one_pass(source: Source, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]]:
    """Every statistic's answers of shape (flat_heads, ...), from one pass over the tiles."""
    totals: list[Any] = [None] * len(statistics)
    has_graph = is_recorded()
    scratch = None if has_graph else Scratch()
    for flat_heads, cuts in groups(source):
        part = source.part(flat_heads, scratch)
        for rows in cuts:
            # A reduction needs at least one key; here its weight is 0.
            tile = Tile(flat_heads, rows, source.columns(rows) or range(1))
            if has_graph:
                # The tensors of a tile are freed at once and recomputed in the backward pass.
                found = checkpoint(_read, part, tile, statistics, use_reentrant=False, preserve_rng_state=False)
            else:
                found = _read(part, tile, statistics)
            for place, statistic in enumerate(statistics):
                totals[place] = statistic.add(totals[place], found[place], tile, source)
    for place, statistic in enumerate(statistics):
        totals[place] = statistic.end(totals[place])
    return totals


def _read(part: Part, tile: Tile, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]]:
    piece, found = part(tile.rows, tile.columns), dict[int, tuple[Tensor, ...]]()
    for overwrites in (False, True):
        for place, one in enumerate(statistics):
            if one.overwrites == overwrites:
                found[place] = one.read(piece, tile)
    return list(map(found.__getitem__, range(len(statistics))))


def groups(source: Source) -> list[tuple[range, list[range]]]:
    """Groups of flat_heads, each with the rows of its tiles. If not all fit, tiles have few flat_heads, many rows."""
    *leading, queries, keys = source.shape
    count, width = math.prod(leading), source.width
    a_row = max(1, keys * width)
    # For a small map, page faults of larger buffers would take longer than filling them.
    limit = min(TILE_ELEMENTS, max(TILE_ELEMENTS // 4, count * queries * a_row // 8))
    few, step = tile_shape(count, queries, a_row, budget=limit, few_rows=TILE_ROWS)
    # The number of tiles is unchanged, but all get about equally many flat_heads.
    few = max(1, -(-count // max(1, -(-count // few))))
    cuts, start = list[range](), 0
    while start < queries:
        # A tile gets more rows where the mask leaves them few keys.
        rows = range(start, min(start + step, queries))
        while rows.stop < queries:
            more = range(start, min(start + 2 * len(rows), queries))
            if few * len(more) * len(source.columns(more)) * width > limit:
                break
            rows = more
        cuts.append(rows)
        start = rows.stop
    return [(flat_heads, cuts) for flat_heads in ranges(count, few)]
