"""Computation of statistics by the first of `READERS` that can: the last is one shared pass over tiles.

A tile has a few queries of a few heads, and all their visible keys. Its weights exist only while the statistics read
it, and are recomputed, tile by tile, for a gradient: memory is linear in T and S.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.call.shapes import without_autocast
from regard.errors import ArgumentError, ShapeError
from regard.kernels.tiled import Tile
from regard.maps.loop.one_loop import NumbaRows
from regard.maps.loop.triton_statistics import TritonRows
from regard.maps.sources.source import Part, Scratch, Source, Statistic
from regard.maps.statistics import definitions as st
from regard.maps.statistics.asked import Answer, Asked, RowReader
from regard.tensors.guards import is_recorded
from regard.tensors.tile_sizes import ranges, tile_shape

TILE_ELEMENTS = 1 << 20
"""The most elements of a tile's largest tensor: 4 MiB in float32. Smaller tiles fit the cache better, but more calls
cancel the gain.
"""
TILE_ROWS = 64
"""A tile reduces its heads before it has fewer queries than this, because narrow matrix products are slow."""


def ask(source: Source, statistic: Statistic) -> Answer:
    """The answers (flat_heads, ...) of a statistic, without tiles if possible."""
    return ask_all(source, [statistic])[0]


def ask_all(source: Source, statistics: Sequence[Statistic]) -> list[Answer]:
    if source.has_signs and (shares := ", ".join(str(one) for one in statistics if one.reads_shares)):
        raise ArgumentError(
            f"{shares} reads the weights of a query as shares of a whole, and some weights of this map are "
            f"below 0: it is {source}; dense(), received() and map @ x are exact, signs and all"
        )
    found, asked, device = dict[Statistic, Answer](), Asked.of(statistics), source.device
    with without_autocast(device):
        for reader in READERS:
            if reader.devices is not None and device.type not in reader.devices:
                continue
            if reader.why_not(source, asked) is not None:
                continue
            missing = list[Statistic]()
            for one, answer in zip(asked.statistics, reader.read(source, asked), strict=True):
                if answer is None:
                    missing.append(one)
                else:
                    found[one] = answer
            if not missing:
                return list(map(found.__getitem__, statistics))
            if len(missing) < len(asked.statistics):
                asked = Asked.of(missing)
    return source.refuse(", ".join(map(str, asked.statistics)))


class AtOnce(RowReader):
    name = "calls of the attention's kernel"

    def why_not(self, source: Source, asked: Asked) -> str | None:
        if len(asked.statistics) > 1 and source.has_blocks and any(one.needs_tiles for one in asked.statistics):
            return "several statistics share a pass"
        return None

    def read(self, source: Source, asked: Asked) -> list[Answer | None]:
        return list(map(source.at_once, asked.statistics))


class Tiles(RowReader):
    name = "tiles"

    def why_not(self, source: Source, asked: Asked) -> str | None:
        return None if source.has_blocks else "only statistics were kept"

    def read(self, source: Source, asked: Asked) -> list[Answer | None]:
        return [*one_pass(source, asked.statistics)]


READERS: tuple[RowReader, ...] = (TritonRows(), AtOnce(), NumbaRows(), Tiles())
"""The readers of rows, in the order of choice: the first that can."""


def explained(source: Source) -> tuple[str, dict[str, str]]:
    refused, asked = dict[str, str](), Asked.of([st.Received(), st.Entropy(), st.TopWeights(1)])
    for reader in READERS:
        if reader.devices is not None and source.device.type not in reader.devices:
            reason: str | None = f"it runs on {' and '.join(sorted(reader.devices))}"
        else:
            reason = reader.why_not(source, asked)
        if reason is None:
            return reader.name, refused
        refused[reader.name] = reason
    return source.refuse("explain()")


def one_pass(source: Source, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]]:
    totals: list[Any] = [None] * len(statistics)
    has_graph = is_recorded()
    scratch = None if has_graph else Scratch()
    heads, cuts = groups(source)
    for flat_heads in heads:
        part = source.part(flat_heads, scratch)
        for rows, columns in cuts:
            tile = Tile(flat_heads, rows, columns)
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


def groups(source: Source) -> tuple[list[range], list[tuple[range, range]]]:
    """Groups of flat_heads, with the rows and columns of their tiles: many rows of few heads, if not all fit."""
    *leading, queries, keys = source.shape
    count, width = math.prod(leading), source.width
    a_row = max(1, keys * width)
    # For a small map, page faults of larger buffers would take longer than filling them.
    limit = min(TILE_ELEMENTS, max(TILE_ELEMENTS // 4, count * queries * a_row // 8))
    step, heads = queries, [range(count)]
    if not 0 < count * queries * a_row <= limit:
        few, step = tile_shape(count, queries, a_row, budget=limit, few_rows=TILE_ROWS)
        # The number of tiles is unchanged, but all get about equally many flat_heads.
        few = max(1, -(-count // max(1, -(-count // few))))
        heads = list(ranges(count, few))
    cuts, start = list[tuple[range, range]](), 0
    while start < queries:
        rows = range(start, min(start + step, queries))
        columns = source.columns(rows)
        # A tile gets more rows where the mask leaves them few keys.
        while rows.stop < queries:
            more = range(start, min(start + 2 * len(rows), queries))
            seen = source.columns(more)
            if len(heads[0]) * len(more) * len(seen) * width > limit:
                break
            rows, columns = more, seen
        # A reduction needs at least one key; here its weight is 0.
        cuts.append((rows, columns or range(1)))
        start = rows.stop
    return heads, cuts


def product(source: Source, x: Tensor) -> Tensor:
    """P x for x (S, N) or (batch..., H, S, N), laid out as the map."""
    if x.dim() < 2 or x.shape[-2] != source.keys:
        raise ShapeError(
            f"map @ x needs x of shape (..., {source.keys}, N) for a map {tuple(source.shape)}, got {tuple(x.shape)}"
        )
    found = source.product(x)
    return source.laid_out(ask(source, st.Product(_by_flat_heads(source, x)))[0]) if found is None else found


def transposed_product(source: Source, x: Tensor) -> Tensor:
    """P^T x for x (T, N) or (batch..., H, T, N), laid out as the map."""
    if x.dim() < 2 or x.shape[-2] != source.queries:
        raise ShapeError(
            f"map.mT @ x needs x of shape (..., {source.queries}, N) for a map {tuple(source.shape)}, "
            f"got {tuple(x.shape)}"
        )
    return source.laid_out(ask(source, st.TransposedProduct(_by_flat_heads(source, x)))[0].mT)


def _by_flat_heads(source: Source, x: Tensor) -> Tensor:
    tail = x.shape[-2:]
    if x.dim() == 2:
        return x.to(source.dtype)[None]
    try:
        return x.expand(*source.leading, *tail).reshape(-1, *tail).to(source.dtype)
    except RuntimeError as error:
        raise ShapeError(f"values of shape {tuple(x.shape)} do not broadcast to {(*source.leading, *tail)}") from error
