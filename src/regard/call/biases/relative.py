"""Biases by the positions of query and key.

    ALiBi(8)                        -m_h |i - j|                       one slope per head; nothing is learned
    T5Bias(table)                   table[bucket(j - i), h]            one scalar per bucket and head
    Shaw(table)                     c q_i . table[clip(j - i)]         reads the query
    TransformerXL(u, v, positions)  c ((q_i + v) . r_{i-j} + u . k_j)  reads query and key

Query i stands at position offset + i and key j at position j; "i - j" above is the distance of these positions. The
default offset is S - T, which aligns the last query with the last key, as in `causal()` and for a key-value cache. Pass
one to `attention` as `bias=`, together with any mask. None of them makes a T x S tensor, except on the `reference`
backend.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from regard.call.biases.base import Bias, BiasPull, SelectedBias
from regard.call.shapes import Rows, Sizes
from regard.errors import ArgumentError, ShapeError, require


class Relative(Bias):
    """A bias by the head and the distance j - (offset + i) alone. Subclasses define `of`."""

    offset: int | None

    @abstractmethod
    def of(self, head: Tensor, distance: Tensor) -> Tensor:
        """The bias at signed distances, negative for a key before its query. The index tensors broadcast."""

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.of(head, j - i - bound_offset(self.offset))

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        if not isinstance(rows, range) or not isinstance(columns, range):
            return super().block(rows, columns, query=query, key=key, sizes=sizes)
        heads = torch.arange(sizes.heads, device=query.device)[:, None]
        return per_head_diagonals(self, heads, rows, columns, query.dtype)[None]

    def laid_out(self, sizes: Sizes, device: torch.device) -> Bias:
        first = 1 - sizes.queries - bound_offset(self.offset)
        distances = torch.arange(first, first + sizes.queries + sizes.keys - 1, device=device)
        values = self.of(torch.arange(sizes.heads, device=device)[:, None], distances)
        return Diagonals(values, sizes.queries - 1)

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        return _OfHeads(self, heads)


@dataclass(frozen=True, slots=True, eq=False)
class Diagonals(Bias):
    """values[h, j - i + origin]: a bias constant along each diagonal."""

    values: Tensor
    """(H, T + S - 1), or (heads of the choice, T + S - 1)."""
    origin: int
    heads: Tensor | None = None
    """After a choice of heads: pair n stands in batch row n, head 0, and reads the values of heads[n]."""

    def learned(self) -> tuple[Tensor, ...]:
        return (self.values,) if self.values.requires_grad else ()

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        each = head if self.heads is None else self.heads[:, None, None, None]
        return self.values[each, j - i + self.origin]

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        if not isinstance(rows, range) or not isinstance(columns, range):
            return super().block(rows, columns, query=query, key=key, sizes=sizes)
        # Window w of the values is row t - 1 - w of the block.
        values = self.values if self.heads is None else self.values[self.heads]
        upwards = torch.arange(len(rows) - 1, -1, -1, device=values.device)
        # (flip would give a column-major block; index_select gives a row-major one.)
        diagonals = values[:, self._places(rows, columns)].to(torch.promote_types(query.dtype, torch.float32))
        block = diagonals.unfold(-1, len(columns), 1).index_select(-2, upwards)
        return block[None] if self.heads is None else block[:, None]

    def linearize(
        self, rows: range, columns: range, *, query: Tensor, key: Tensor, sizes: Sizes, learned: Sequence[Tensor]
    ) -> tuple[Tensor, BiasPull]:
        def pull(grad: Tensor, totals: Sequence[Tensor]) -> None:
            for total in totals:
                sums = diagonal_sums(grad)
                part = total[:, self._places(rows, columns)]
                if self.heads is None:
                    part += sums.sum(0)
                else:
                    part.index_add_(0, self.heads, sums.squeeze(1).to(part.dtype))

        return self.block(rows, columns, query=query, key=key, sizes=sizes).detach(), pull

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        return replace(self, heads=heads if self.heads is None else self.heads[batches])

    def _places(self, rows: range, columns: range) -> slice:
        first = columns.start - (rows.stop - 1) + self.origin
        return slice(first, first + len(rows) + len(columns) - 1)


def diagonal_sums(block: Float[Tensor, "*batch t s"]) -> Float[Tensor, "*batch diagonals"]:
    """The sum of each diagonal, from the bottom left corner to the top right: (..., t + s - 1).

    >>> diagonal_sums(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([3., 5., 2.])
    """
    *batch, t, s = block.shape
    width = t + s - 1
    # Row i is shifted by t - 1 - i, which turns diagonals into columns.
    skewed = block.new_zeros(*batch, t, width)
    strides = (*skewed.stride()[:-2], width - 1, 1)
    skewed.as_strided(block.shape, strides, t - 1).copy_(block)
    return skewed.sum(-2)


@dataclass(frozen=True, slots=True, eq=False)
class _OfHeads(SelectedBias):
    """A bound relative bias with a choice of heads: pair n stands in batch row n, head 0."""

    bias: Relative

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        if not isinstance(rows, range) or not isinstance(columns, range):
            return Bias.block(self, rows, columns, query=query, key=key, sizes=sizes)
        return per_head_diagonals(self.bias, self.heads[:, None, None], rows, columns, query.dtype)

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        return _OfHeads(self.bias, self.heads[batches])


def per_head_diagonals(bias: Relative, head: Tensor, rows: range, columns: range, dtype: torch.dtype) -> Tensor:
    """A block (..., t, s) that is constant along each diagonal, for heads (..., 1)."""
    first = columns.start - (rows.stop - 1) - bound_offset(bias.offset)
    distances = torch.arange(first, first + len(rows) + len(columns) - 1, device=head.device)
    # Window w of the distances is row t - 1 - w of the block. At least float32, cast before the expansion.
    diagonals = bias.of(head, distances).to(torch.promote_types(dtype, torch.float32))
    return diagonals.unfold(-1, len(columns), 1).flip(-2)


def gather_offsets(products: Tensor, index: Tensor) -> Tensor:
    """products[..., i, index[i, j]]."""
    return products.gather(-1, index.expand(*products.shape[:-1], index.shape[-1]))


def scaled_vectors(vectors: Tensor, scale: float | None) -> Tensor:
    """The vectors times the scale; the default is 1 / sqrt(D)."""
    return vectors * (vectors.shape[-1] ** -0.5 if scale is None else scale)


def query_offset(offset: int | None, sizes: Sizes) -> int:
    """The position of the first query; the default is S - T."""
    return sizes.keys - sizes.queries if offset is None else offset


def bound_offset(offset: int | None) -> int:
    if offset is None:
        raise ArgumentError("this bias has not met a call yet: bind it, or give it an offset")
    return offset


def require_heads(name: str, what: str, got: int, sizes: Sizes) -> None:
    if got != sizes.heads:
        raise ShapeError(f"{name} needs one for each of the query's {sizes.heads} heads, got {got} {what}")


def require_table(name: str, what: str, table: Tensor, *, dims: int) -> None:
    require(table, Tensor, f"the table of {name}", f"a float tensor {what}")
    if table.dim() != dims or not table.is_floating_point() or 0 in table.shape:
        raise ShapeError(f"{name} takes a float tensor {what}, got {table.dtype} of shape {tuple(table.shape)}")


def require_width(name: str, what: str, table: Tensor, query: Tensor) -> None:
    if table.shape[-1] != query.shape[-1]:
        raise ShapeError(f"{name} needs {what} as wide as the query, {query.shape[-1]}, got {tuple(table.shape)}")
