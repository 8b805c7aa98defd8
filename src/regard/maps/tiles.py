"""One pass over the tiles of a map, shared by every statistic that is asked for.

A tile is a few queries of a few heads against every key that they may see. Its weights exist while the
statistics read it, and are computed again, tile by tile, for a gradient: memory is linear in T and S.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.backends.tiled import Tile
from regard.mechanisms.tile_sizes import ranges, tile_shape

TILE_ELEMENTS = 1 << 20
"""Numbers that a tile's largest tensor may hold, 4 MiB in float32: what fewer save in the cache, calls cost."""
TILE_ROWS = 64
"""Queries below which a tile is rather made of fewer heads: narrow matrix products are slow."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The weights (cells, t, s) of a tile, and their logarithms where they were at hand."""

    weights: Tensor
    logs: Tensor | None = None
    unit: float = 1.0
    """What a logarithm of 1 is in nats: ln 2 where they are to base 2."""
    is_scratch: bool = False
    """Whether the logarithms are finite, and may be overwritten by the one statistic that reads them."""


Rows = range | Tensor
Part = Callable[[Rows, Rows], Piece]


class Source(ABC):
    """Where tiles come from. Cells are the flat indices of the map's leading dimensions."""

    cells: int
    queries: int
    keys: int
    width: int = 1
    """How many numbers are held for each pair while a tile is made."""
    has_signs: bool = False
    """Whether weights may be below 0."""

    @abstractmethod
    def columns(self, rows: range) -> range:
        """The keys outside which the weights of these rows are 0."""

    @abstractmethod
    def part(self, cells: range, *, reuse: bool = False) -> Part:
        """What gives the weights of those cells for any rows and columns.

        With `reuse`, a piece may lie where the one before lay, and carries no gradient.
        """

    def groups(self) -> Iterator[tuple[range, list[range]]]:
        """Cells that make a tile together, and the rows of its tiles: few cells and many rows where both do not fit."""
        a_row = max(1, self.keys * self.width)
        # Buffers of a small map that were larger would take longer to touch for the first time than to fill.
        limit = min(TILE_ELEMENTS, max(TILE_ELEMENTS // 4, self.cells * self.queries * a_row // 8))
        few, rows = tile_shape(self.cells, self.queries, a_row, budget=limit, few_rows=TILE_ROWS)
        # As many tiles, but of the same number of cells.
        few = -(-self.cells // -(-self.cells // few))
        cuts = list(self._cuts(few, rows, limit))
        for cells in ranges(self.cells, few):
            yield cells, cuts

    def _cuts(self, cells: int, step: int, limit: int) -> Iterator[range]:
        """Rows of tiles, `step` and more where the mask leaves them few keys."""
        start = 0
        while start < self.queries:
            rows = range(start, min(start + step, self.queries))
            while rows.stop < self.queries:
                more = range(start, min(start + 2 * len(rows), self.queries))
                if cells * len(more) * len(self.columns(more)) * self.width > limit:
                    break
                rows = more
            yield rows
            start = rows.stop


class Statistic(ABC):
    """What can be read off tiles. `read` sees each tile once and is what a gradient runs through."""

    @abstractmethod
    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor, ...]:
        """What one tile says."""

    @abstractmethod
    def add(self, total: Any, read: tuple[Tensor, ...], tile: Tile, source: Source) -> Any:
        """The total with one more tile; None at first. Tiles come group of cells by group, each from the first row."""

    @abstractmethod
    def end(self, total: Any) -> tuple[Tensor, ...]:
        """The answers (cells, ...)."""


def one_pass(source: Source, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]]:
    """Every statistic's answers of shape (cells, ...), from one pass over the tiles."""
    totals: list[Any] = [None for _ in statistics]
    for cells, cuts in source.groups():
        part = source.part(cells, reuse=not torch.is_grad_enabled())
        for rows in cuts:
            # A reduction needs a key to look at; its weight is 0.
            tile = Tile(cells, rows, source.columns(rows) or range(1))
            found = _read(part, tile, statistics)
            totals = [s.add(t, r, tile, source) for s, t, r in zip(statistics, totals, found, strict=True)]
    return [statistic.end(total) for statistic, total in zip(statistics, totals, strict=True)]


def joined(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat`, without a copy of a single one."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)


def _read(part: Part, tile: Tile, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]]:
    def read() -> list[tuple[Tensor, ...]]:
        piece = part(tile.rows, tile.columns)
        return [statistic.read(piece, tile) for statistic in statistics]

    if not torch.is_grad_enabled():
        return read()
    # What a tile holds is given up at once and made again in the backward pass.
    return checkpoint(read, use_reentrant=False, preserve_rng_state=False)
