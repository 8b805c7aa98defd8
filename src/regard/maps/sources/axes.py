"""Some queries and keys of another source, and queries and keys with their roles exchanged."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.call.shapes import Dimensions, Rows, take_rows
from regard.maps.sources.derived import DerivedSource
from regard.maps.sources.source import Part, PartOf, Piece, Scratch, Source, Statistic
from regard.maps.statistics import definitions as st
from regard.maps.statistics.pooling import Grid
from regard.maps.statistics.tiles import one_pass


@dataclass(frozen=True, eq=False)
class SelectionSource(DerivedSource):
    """Some queries and keys of a source. The weights are unchanged, so rows may sum to less than 1."""

    of: Source
    rows: Rows
    chosen: Rows

    @property
    def part_of(self) -> PartOf:
        whole = self.of.part_of
        return whole._replace(rows=_of(whole.rows, self.rows), columns=_of(whole.columns, self.chosen))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.of.leading, len(self.rows), len(self.chosen)))

    def __str__(self) -> str:
        return f"some rows and columns of a map {tuple(self.of.shape)}: {self.of}"

    def columns(self, rows: range) -> range:
        if not isinstance(self.rows, range) or not isinstance(self.chosen, range):
            return range(self.keys)
        inner = self.of.columns(range(self.rows.start + rows.start, self.rows.start + rows.stop))
        start = max(inner.start, self.chosen.start)
        stop = max(start, min(inner.stop, self.chosen.stop))
        return range(start - self.chosen.start, stop - self.chosen.start)

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        inner = self.of.part(flat_heads, scratch)
        return lambda rows, columns: inner(_of(self.rows, rows), _of(self.chosen, columns))

    def at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        """0 for unselected rows and columns. It pays if most weights are selected: a tile of few rows is faster."""
        if 2 * len(self.rows) * len(self.chosen) < self.of.queries * self.of.keys:
            return None
        match statistic:
            case st.Product(x):
                found = self.of.at_once(st.Product(_spread(x, self.chosen, self.of.keys)))
                return None if found is None else (take_rows(found[0].mT, self.rows).mT,)
            case st.TransposedProduct(x):
                found = self.of.at_once(st.TransposedProduct(_spread(x, self.rows, self.of.queries)))
                return None if found is None else (take_rows(found[0], self.chosen),)
            case st.Received():
                ones = torch.ones(1, len(self.rows), 1, dtype=self.dtype, device=self.device)
                found = self.at_once(st.TransposedProduct(ones))
                return None if found is None else (found[0][:, 0],)
        return None

    def gradient(self, grad_output: Tensor | None, asked: str) -> Source:
        if grad_output is not None:
            return super().gradient(grad_output, asked)
        return replace(self, of=self.of.gradient(None, asked))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "SelectionSource":
        rows, chosen = (i if isinstance(i, range) else change(i) for i in (self.rows, self.chosen))
        return SelectionSource(self.of.mapped(change), rows, chosen)


def _spread(x: Tensor, chosen: Rows, length: int) -> Tensor:
    """Scatter rows (flat_heads, n, N) to their indices in `length`, 0 elsewhere; repeated indices are summed."""
    places = torch.arange(chosen.start, chosen.stop, device=x.device) if isinstance(chosen, range) else chosen
    return x.new_zeros(len(x), length, x.shape[-1]).index_add(1, places, x)


def _of(chosen: Rows, places: Rows) -> Rows:
    if not isinstance(chosen, range):
        return chosen[places.start : places.stop] if isinstance(places, range) else chosen[places]
    if isinstance(places, range):
        return range(chosen.start + places.start, chosen.start + places.stop)
    return places + chosen.start


@dataclass(frozen=True, eq=False)
class TransposedSource(DerivedSource):
    of: Source

    @classmethod
    def of_source(cls, source: Source) -> Source:
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
