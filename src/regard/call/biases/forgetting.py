"""The bias of a forgetting gate: a decay of attention with the tokens in between."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.call.biases.base import Bias, BlockBias, DenseBias
from regard.call.biases.combined import SummedBias
from regard.call.shapes import Rows, Sizes
from regard.errors import ShapeError


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
