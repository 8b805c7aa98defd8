"""The weights of a linear recurrence, as the source of a map."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from regard.call.shapes import UNNAMED, Dimensions
from regard.errors import ArgumentError
from regard.kernels.recurrence import Chunks, Recurrence
from regard.maps.sources.source import NamedSource, Part, Piece, Scratch, Statistic
from regard.maps.statistics import definitions as st
from regard.tensors.guards import has_values


class LinearRecurrent(NamedSource):
    """P_tj = c q_t^T A_t ... A_{j+1} k_j beta_j. Nothing makes its rows sum to 1, and its weights may be below 0."""

    layout: tuple[int, ...]
    """(batch..., H)."""

    @property
    @abstractmethod
    def recurrence(self) -> Recurrence:
        """Its factors, (N, ...)."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.layout, self.recurrence.query.shape[1], self.recurrence.key.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.recurrence.dtype

    @property
    def device(self) -> torch.device:
        return self.recurrence.query.device

    @property
    def has_signs(self) -> bool:
        """Without removal, queries and keys at least 0 have weights at least 0."""
        query, key = self.recurrence.query, self.recurrence.key
        if self.recurrence.has_removal or not has_values(query) or not key.numel():
            return True
        return bool((query.detach() < 0).any() | (key.detach() < 0).any())

    def tensors(self) -> list[Tensor]:
        return self.recurrence.tensors()

    def __str__(self) -> str:
        return f"a linear recurrence {self.recurrence}"

    def refuse(self, asked: str) -> NoReturn:
        raise ArgumentError(f"{asked} is for the map of one call with scores, and this map is {self}, which has none")

    def support(self, rows: range) -> range:
        return range(rows.stop + self.recurrence.offset)

    def columns(self, rows: range) -> range:
        # (A weight of 0 behind the query is above those below 0.)
        return range(self.keys) if self.has_signs else self.support(rows)

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        recurrence = self.recurrence
        if len(flat_heads) < self.flat_heads:
            recurrence = recurrence.mapped(lambda x: x[flat_heads.start : flat_heads.stop])
        block = recurrence.chunked().blocks()
        return lambda rows, columns: Piece(block(rows, columns))

    def at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        match statistic:
            case st.Product(x):
                return (self._chunks().product(x)[0],)
            case st.TransposedProduct(x):
                return (self._chunks().transposed_product(x).mT,)
            case st.Received():
                ones = torch.ones(1, self.queries, 1, dtype=self.dtype, device=self.device)
                return (self._chunks().transposed_product(ones)[..., 0],)
            case st.Pooled(grid) if not statistic.of_largest and grid.columns.count <= self.recurrence.key.shape[-1]:
                indicators = torch.nn.functional.one_hot(grid.columns.owners(self.device), grid.columns.count)
                by_columns = self._chunks().product(indicators.to(self.dtype)[None])[0]
                return (statistic.finished(grid.rows.reduce(by_columns, -2, 0, largest=False)[0]),)
        return None

    def _chunks(self) -> Chunks:
        return self.recurrence.chunked()

    def choose(self, flat_heads: Tensor | None, leading: tuple[int, ...]) -> "GivenRecurrence":
        names = Dimensions.unknown(len(leading), UNNAMED)
        chosen = self.recurrence if flat_heads is None else self.recurrence.mapped(lambda x: x[flat_heads])
        return GivenRecurrence(chosen, leading, names)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "GivenRecurrence":
        return GivenRecurrence(self.recurrence.mapped(change), self.layout, self.dimensions)


@dataclass(frozen=True, slots=True, eq=False)
class GivenRecurrence(LinearRecurrent):
    """The weights of a call of `regard.linear_attention`."""

    given: Recurrence
    layout: tuple[int, ...]
    names: Dimensions

    @property
    def recurrence(self) -> Recurrence:
        return self.given
