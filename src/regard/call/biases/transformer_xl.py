"""Transformer-XL's relative positions."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from regard.call.biases.base import Bias
from regard.call.biases.relative import (
    bound_offset,
    gather_offsets,
    query_offset,
    require_heads,
    require_table,
    require_width,
    scaled_vectors,
)
from regard.call.shapes import Sizes
from regard.errors import ShapeError, require


@dataclass(frozen=True, slots=True, eq=False)
class TransformerXL(Bias):
    r"""Transformer-XL's positions: $b_{hij} = c \, ((q_i + v_h) \cdot r_{h,i-j} + u_h \cdot k_j)$.

    Together with the score c q_i . k_j this gives c times the paper's
    $A^{rel}_{ij} = q_i \cdot k_j + q_i \cdot r_{i-j} + u \cdot k_j + v \cdot r_{i-j}$, terms (a) to (d).

    Args:
        content_bias: u, (H, D).
        position_bias: v, (H, D).
        positions: r, (H, N, D): row n is $W_{k,R} R_n$, the projected sinusoid of distance i - j = first + n,
            where `sinusoidal(torch.arange(first, first + N), ...)` is R.
        first: the distance of the first row. At 0, as in the paper, a key after its query has no r and is excluded (its
            bias is -inf). For attention in both directions, when T = S, it is -(T - 1).
        scale: c, equal to that of the score. The default is 1/sqrt(D), as in `ScaledDot()`.
        offset: query i stands at position offset + i; default S - T.

    Raises:
        ShapeError: the tensors do not fit each other; or, in a call, H or D differ, or there are too few rows
            for the furthest key.

    Source: Dai et al. 2019 (arXiv:1901.02860), section 3.3.

    >>> import regard
    >>> zero, q = torch.zeros(1, 2), torch.ones(1, 1, 3, 2)
    >>> r = torch.tensor([[[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]])  # the further, the better
    >>> bias = TransformerXL(zero, zero, r, scale=0.5)
    >>> regard.attention(q, 0 * q, q, bias=bias, return_weights=True).weights[0, 0].dense()
    tensor([[1.0000, 0.0000, 0.0000],
            [0.7311, 0.2689, 0.0000],
            [0.6652, 0.2447, 0.0900]])
    """

    reads_vectors = True

    content_bias: Float[Tensor, "H D"]
    position_bias: Float[Tensor, "H D"]
    positions: Float[Tensor, "H N D"]
    first: int = 0
    scale: float | None = None
    offset: int | None = None

    def __post_init__(self) -> None:
        require_table("TransformerXL", "positions of shape (H, N, D)", self.positions, dims=3)
        heads, _, dim = self.positions.shape
        for name, tensor in (("content_bias", self.content_bias), ("position_bias", self.position_bias)):
            require(tensor, Tensor, name, "a tensor (H, D)")
            if tensor.shape != (heads, dim):
                raise ShapeError(
                    f"TransformerXL with positions {tuple(self.positions.shape)} needs a {name} of shape "
                    f"{(heads, dim)}, got {tuple(tensor.shape)}"
                )

    def learned(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.content_bias, self.position_bias, self.positions) if t.requires_grad)

    def bind(self, sizes: Sizes, device: torch.device) -> Bias:
        require_heads("TransformerXL", "heads in its positions", self.positions.shape[0], sizes)
        offset = query_offset(self.offset, sizes)
        furthest, rows = offset + sizes.queries - 1, self.positions.shape[1]
        if furthest >= self.first + rows:
            raise ShapeError(
                f"TransformerXL needs positions up to distance {furthest}, from the last query to the first key: "
                f"{furthest - self.first + 1} rows from distance {self.first} on, got {rows}"
            )
        u, v, r = (t.to(device) for t in (self.content_bias, self.position_bias, self.positions))
        return replace(self, content_bias=u, position_bias=v, positions=r, offset=offset)

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        require_width("TransformerXL", "positions", self.positions, query)
        each = head[..., 0]  # (H, 1), or (N, 1, 1) for a choice of heads
        u, v = (t.to(query.dtype)[each] for t in (self.content_bias, self.position_bias))
        r = self.positions.to(query.dtype)[each[..., 0]]
        products = scaled_vectors(query + v, self.scale) @ r.mT
        row = i + bound_offset(self.offset) - j - self.first
        near = gather_offsets(products, row.clamp(0, r.shape[-2] - 1))
        return near.masked_fill(row < 0, -torch.inf) + scaled_vectors(u, self.scale) @ key.mT

    def __str__(self) -> str:
        return "Transformer-XL's relative positions"
