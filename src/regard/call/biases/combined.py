"""Biases made of other biases: a sum of two, and one for some queries only."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.call.biases.base import Bias, BlockBias
from regard.call.shapes import Rows, Sizes, index_tensor


@dataclass(frozen=True, slots=True, eq=False)
class SummedBias(BlockBias):
    one: Bias
    other: Bias

    @property
    def reads_vectors(self) -> bool:  # type: ignore[override]
        return self.one.reads_vectors or self.other.reads_vectors

    def learned(self) -> tuple[Tensor, ...]:
        return (*self.one.learned(), *self.other.learned())

    @property
    def per_key(self) -> Tensor | None:
        one, other = self.one.per_key, self.other.per_key
        return None if one is None or other is None else one + other

    def split(self, sizes: Sizes, device: torch.device, *, causal: bool) -> tuple[Tensor, Tensor | None] | None:
        one, other = (bias.split(sizes, device, causal=causal) for bias in (self.one, self.other))
        if one is None or other is None:
            return None
        rows = [part for part in (one[1], other[1]) if part is not None]
        return one[0] + other[0], sum(rows[1:], start=rows[0]) if rows else None

    def is_zero(self, rows: range, columns: range) -> bool:
        return self.one.is_zero(rows, columns) and self.other.is_zero(rows, columns)

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        one, other = (bias.block(rows, columns, query=query, key=key, sizes=sizes) for bias in (self.one, self.other))
        return one + other

    def pairs(self, rows: Tensor, columns: Tensor, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        one, other = (bias.pairs(rows, columns, query=query, key=key, sizes=sizes) for bias in (self.one, self.other))
        return one + other

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        return SummedBias(self.one.select(batches, heads), self.other.select(batches, heads))

    def laid_out(self, sizes: Sizes, device: torch.device) -> Bias:
        return SummedBias(self.one.laid_out(sizes, device), self.other.laid_out(sizes, device))


@dataclass(frozen=True, slots=True, eq=False)
class OfQueries(BlockBias):
    """A bound bias for the chosen queries only; 0 for the others."""

    bias: Bias
    chosen: Tensor
    """The chosen queries, bool (T)."""
    places: tuple[int, ...]

    def learned(self) -> tuple[Tensor, ...]:
        return self.bias.learned()

    def is_zero(self, rows: range, columns: range) -> bool:
        return not any(place in rows for place in self.places)

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        block = self.bias.block(rows, columns, query=query, key=key, sizes=sizes)
        # A weight of -inf times 0 would be NaN.
        return torch.where(self.chosen[index_tensor(rows, self.chosen.device)][:, None], block, 0.0)

    def pairs(self, rows: Tensor, columns: Tensor, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        pairs = self.bias.pairs(rows, columns, query=query, key=key, sizes=sizes)
        return torch.where(self.chosen[rows][:, None, None, None, None], pairs, 0.0)

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        return OfQueries(self.bias.select(batches, heads), self.chosen, self.places)


def added(one: Bias | None, other: Bias | None) -> Bias | None:
    """The sum of two bound biases; None stands for 0."""
    if one is None or other is None:
        return other if one is None else one
    return SummedBias(one, other)
