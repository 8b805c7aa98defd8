"""Shaw's relative positions: one vector for each distance is added to the keys."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from regard.call.biases.base import Bias
from regard.call.biases.relative import (
    bound_offset,
    gather_offsets,
    query_offset,
    require_table,
    require_width,
    scaled_vectors,
)
from regard.call.shapes import Sizes
from regard.errors import ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class Shaw(Bias):
    r"""Relative position representations: $b_{ij} = c \, q_i \cdot a_{\mathrm{clip}(j - i, -k, k)}$.

    Together with the score c q_i . k_j this gives the paper's $e_{ij} = c \, q_i \cdot (k_j + a_{ij})$.

    Args:
        table: $a^K$, (2k + 1, D); the first row is the vector of distance -k (the key stands k before the query). All
            heads share the table, as in the paper.
        scale: c, equal to that of the score. The default is 1/sqrt(D), as in `ScaledDot()`.
        offset: query i stands at position offset + i; default S - T.

    The other half of the paper, vectors $a^V$ added to the values (equation 3), is not a bias and is not implemented.

    Raises:
        ShapeError: the table is not 2-D and floating with an odd number of rows; or, in a call, its rows
            are not as wide as the query.

    Source: Shaw et al. 2018 (arXiv:1803.02155), equations 4 and 5 and section 3.2.

    >>> import regard
    >>> q = torch.ones(3, 1)
    >>> bias = Shaw(torch.tensor([[0.0], [1.0], [2.0]]))
    >>> regard.attention(q, 0 * q, q, bias=bias, return_weights=True).weights.dense().log()
    tensor([[-1.8620, -0.8620, -0.8620],
            [-2.4076, -1.4076, -0.4076],
            [-1.5514, -1.5514, -0.5514]])
    """

    reads_vectors = True

    table: Float[Tensor, "distances D"]
    scale: float | None = None
    offset: int | None = None

    def __post_init__(self) -> None:
        require_table("Shaw", "(2k + 1, D)", self.table, dims=2)
        if self.table.shape[0] % 2 == 0:
            raise ShapeError(f"Shaw's table has 2k + 1 rows, for the distances -k to k; got {self.table.shape[0]}")

    def learned(self) -> tuple[Tensor, ...]:
        return (self.table,) if self.table.requires_grad else ()

    def bind(self, sizes: Sizes, device: torch.device) -> Bias:
        return replace(self, table=self.table.to(device), offset=query_offset(self.offset, sizes))

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        require_width("Shaw", "table", self.table, query)
        furthest = self.table.shape[0] // 2
        products = scaled_vectors(query, self.scale) @ self.table.to(query.dtype).mT
        distance = (j - i - bound_offset(self.offset)).clamp(-furthest, furthest)
        return gather_offsets(products, distance + furthest)

    def __str__(self) -> str:
        return f"Shaw's relative positions up to {self.table.shape[0] // 2}"
