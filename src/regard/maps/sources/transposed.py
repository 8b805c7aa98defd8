"""A map with the roles of queries and keys exchanged."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.call.shapes import Dimensions
from regard.maps.sources.derived import DerivedSource
from regard.maps.sources.source import Part, PartOf, Piece, Scratch, Source, Statistic
from regard.maps.statistics import definitions as st
from regard.maps.statistics.pooling import Grid
from regard.maps.statistics.tiles import one_pass


@dataclass(frozen=True, eq=False)
class TransposedSource(DerivedSource):
    """P^T: a row has the weights of one key, by query."""

    of: Source

    @classmethod
    def of_source(cls, source: Source) -> Source:
        """The transpose; that of a transpose is the original."""
        return source.of if isinstance(source, TransposedSource) else cls(source)

    @property
    def shape(self) -> torch.Size:
        *leading, queries, keys = self.of.shape
        return torch.Size((*leading, keys, queries))

    @property
    def part_of(self) -> PartOf:
        rows, columns, queries, keys = self.of.part_of
        return PartOf(columns, rows, keys, queries)

    @property
    def width(self) -> int:
        return self.of.width

    @property
    def dimensions(self) -> Dimensions:
        return self.of.dimensions.transposed()

    def with_dimensions(self, dimensions: Dimensions) -> Source:
        return super().with_dimensions(dimensions.transposed())

    def __str__(self) -> str:
        return f"the transpose of a map {tuple(self.of.shape)}: {self.of}"

    def grid(self, wanted: Grid, how: str) -> Grid:
        found = self.of.grid(Grid(wanted.columns, wanted.rows), how)
        return Grid(found.columns, found.rows)

    def columns(self, rows: range) -> range:
        return range(self.keys)

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        inner = self.of.part(flat_heads)
        return lambda rows, columns: Piece(inner(columns, rows).weights.mT)

    def at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        match statistic:
            case st.Product(x):
                found = self._asked(st.TransposedProduct(x))
                return None if found is None else (found.mT,)
            case st.TransposedProduct(x):
                found = self._asked(st.Product(x))
                return None if found is None else (found.mT,)
            case st.Received():
                ones = torch.ones(1, self.of.keys, 1, dtype=self.dtype, device=self.device)
                found = self._asked(st.Product(ones))
                return None if found is None else (found[..., 0],)
            case st.Pooled(grid, how):
                found = self._asked(st.Pooled(Grid(grid.columns, grid.rows), how))
                return None if found is None else (found.mT,)
        return None

    def _asked(self, statistic: Statistic) -> Tensor | None:
        found = self.of.at_once(statistic)
        if found is None and self.has_blocks:
            found = one_pass(self.of, [statistic])[0]
        return None if found is None else found[0]
