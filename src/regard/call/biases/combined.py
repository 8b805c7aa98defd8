"""Biases made of other biases: a sum of two, one for some queries only, and that of a forgetting gate."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.call.biases.base import Bias, BlockBias, DenseBias
from regard.call.shapes import Rows, Sizes, index_tensor
from regard.errors import ShapeError


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


@dataclass(frozen=True, slots=True, eq=False)
class Forgetting(BlockBias):
    r"""$b_{ij} = c_i - c_j = \sum_{l=j+1}^{i} \log f_l$ with $c_j = \sum_{l \le j} \log f_l$, for gates f in (0, 1).

    Query i stands at position S - T + i. A softmax of dot products takes it as one number for each key and one for each
    row, which the fused kernels run. The rounding of b is that of c.

    Args:
        sums: c of all keys, (batch..., H, 1, S).

    Raises:
        ShapeError: in a call, the sums are not one for each key, or there are more queries than keys.

    Source: Lin et al. 2025 (arXiv:2503.02130), equations 5 to 7.

    >>> import regard
    >>> q, halves = torch.zeros(1, 1, 3, 2), torch.tensor([0.5, 0.5, 0.5]).log()
    >>> bias = Forgetting(halves.cumsum(-1)[None, None, None])
    >>> regard.attention(q, q, q, bias=bias, mask=regard.causal(), return_weights=True).weights[0, 0, 2]
    tensor([0.1429, 0.2857, 0.5714])
    """

    sums: Float[Tensor, "..."]

    def learned(self) -> tuple[Tensor, ...]:
        return (self.sums,) if self.sums.requires_grad else ()

    def bind(self, sizes: Sizes, device: torch.device) -> Bias:
        if tuple(self.sums.shape[-2:]) != (1, sizes.keys) or sizes.queries > sizes.keys:
            raise ShapeError(
                f"Forgetting has the sums (..., 1, S) of all keys, and its queries are the last of these: got sums "
                f"{tuple(self.sums.shape)} for {sizes.queries} queries and {sizes.keys} keys"
            )
        of_rows = self.sums[..., sizes.keys - sizes.queries :].mT
        return RowsLessKeys(DenseBias(of_rows).bind(sizes, device), DenseBias(-self.sums).bind(sizes, device))

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        raise AssertionError("its bound form is a sum")

    def __str__(self) -> str:
        return "a forgetting gate"


@dataclass(frozen=True, slots=True, eq=False)
class RowsLessKeys(SummedBias):
    """The sum of a finite tensor (..., T, 1) of rows and one (..., 1, S) of keys."""

    def split(self, sizes: Sizes, device: torch.device, *, causal: bool) -> tuple[Tensor, Tensor | None] | None:
        rows, keys = self.one, self.other
        assert isinstance(rows, DenseBias)
        assert isinstance(keys, DenseBias)
        return keys.tensor, rows.tensor[..., 0]
