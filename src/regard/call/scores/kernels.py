"""Kernels of a distance as scores: the attention pooling of Nadaraya and Watson.

A kernel score is the logarithm of the kernel, so softmax divides each weight by the sum of its row: $P_{ij} = K(q_i,
k_j) / \\sum_l K(q_i, k_l)$, the estimator of Nadaraya (1964) and Watson (1964). With `Unnormalized()` the weights are
the values of the kernel themselves. Where a compact kernel is 0, its score is -inf. A query without a key near it has
the weight 0 everywhere.

`u` means $\\lVert q - k \\rVert / w$. The width w is a scalar, perhaps learned, or one for each head (H,).
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from regard.call.scores.base import PreparedDot, Score, per_head, require_for_heads, same_width

Width = float | Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gaussian(PreparedDot):
    r"""$\log K = -u^2 / 2$.

    It runs on the fused kernels, as the dot product of $[q, 1, -\lVert q \rVert^2 / 2] / w^2$ and $[k, -\lVert k
    \rVert^2 / 2, 1]$. Positions are measured from the mean of the keys. The remaining rounding error is about $6 \cdot
    10^{-8}\, (R / w)^2$ of a weight in float32, where R is the spread of the keys.

    Source: Nadaraya 1964; Watson 1964; Zhang et al., Dive into Deep Learning, section 11.2.

    >>> q, k = Gaussian(width=2.0).prepare(torch.tensor([[0.0]]), torch.tensor([[0.0], [2.0]]))
    >>> Gaussian().block(q, k)
    tensor([[ 0.0000, -0.5000]])
    """

    width: Width = 1.0
    """w: the standard deviation."""

    def __post_init__(self) -> None:
        require_for_heads(self.width)

    def prepare(self, query: Float[Tensor, "*queries T D"], key: Float[Tensor, "*keys S D"]) -> tuple[Tensor, Tensor]:
        query, key = same_width(self, query, key)
        # The squares cancel; in half precision no digits would remain.
        dtype = torch.promote_types(query.dtype, torch.float32)
        query, key = query.to(dtype), key.to(dtype)
        # A shift changes no distance, so it takes no gradient.
        center = key.detach().mean(-2, keepdim=True)
        key = key - center
        if query.dim() > 2:
            center = center.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        query = query - center
        one_q, one_k = torch.ones_like(query[..., :1]), torch.ones_like(key[..., :1])
        half_q, half_k = (-0.5 * x.square().sum(-1, keepdim=True) for x in (query, key))
        precision = per_head(self.width, query).to(dtype) ** -2
        return torch.cat([query, one_q, half_q], -1) * precision, torch.cat([key, half_k, one_k], -1)

    def __str__(self) -> str:
        return "Gaussian kernel"


@dataclass(frozen=True, slots=True, eq=False)
class DistanceKernel(Score):
    """A kernel of differences of vectors: D elements in memory for each pair while a block runs."""

    width: Width = 1.0
    """w: the distance at which u is 1."""

    def __post_init__(self) -> None:
        require_for_heads(self.width)

    def learned(self) -> tuple[Tensor, ...]:
        return (self.width,) if isinstance(self.width, Tensor) else ()

    def select(self, heads: Tensor) -> Self:
        if not isinstance(self.width, Tensor) or self.width.numel() == 1:
            return self
        return replace(self, width=self.width.reshape(-1)[heads][:, None, None, None])

    def pair_width(self, dim: int) -> int:
        return dim

    def block(self, query: Tensor, key: Tensor) -> Tensor:
        squared = (query[..., :, None, :] - key[..., None, :, :]).square().sum(-1)
        return self.log_kernel(squared / per_head(self.width, query).to(squared.dtype) ** 2)

    @abstractmethod
    def log_kernel(self, squared: Float[Tensor, "*batch t s"]) -> Float[Tensor, "*batch t s"]:
        """log K as a function of u^2."""

    def __str__(self) -> str:
        return f"{type(self).__name__} kernel"


class Laplacian(DistanceKernel):
    r"""$\log K = -u$.

    >>> Laplacian().log_kernel(torch.tensor([0.0, 4.0]))
    tensor([-0., -2.])
    """

    def log_kernel(self, squared: Float[Tensor, "*batch t s"]) -> Float[Tensor, "*batch t s"]:
        return -_root(squared)


class Boxcar(DistanceKernel):
    r"""$K = 1$ where $u < 1$, else 0.

    >>> Boxcar().log_kernel(torch.tensor([0.5, 1.0]))
    tensor([0., -inf])
    """

    def log_kernel(self, squared: Float[Tensor, "*batch t s"]) -> Float[Tensor, "*batch t s"]:
        return torch.where(squared >= 1, -torch.inf, 0.0 * squared)


class Epanechnikov(DistanceKernel):
    r"""$K = 1 - u^2$ where $u < 1$, else 0.

    >>> Epanechnikov().log_kernel(torch.tensor([0.0, 0.5, 1.0])).exp()
    tensor([1.0000, 0.5000, 0.0000])
    """

    def log_kernel(self, squared: Float[Tensor, "*batch t s"]) -> Float[Tensor, "*batch t s"]:
        outside = squared >= 1
        return torch.where(outside, -torch.inf, torch.log1p(-squared.masked_fill(outside, 0.0)))


class Triangular(DistanceKernel):
    r"""$K = 1 - u$ where $u < 1$, else 0. Dive into Deep Learning calls this kernel Epanechikov.

    >>> Triangular().log_kernel(torch.tensor([0.0, 0.25, 1.0])).exp()
    tensor([1.0000, 0.5000, 0.0000])
    """

    def log_kernel(self, squared: Float[Tensor, "*batch t s"]) -> Float[Tensor, "*batch t s"]:
        outside = squared >= 1
        return torch.where(outside, -torch.inf, torch.log1p(-_root(squared.masked_fill(outside, 0.0))))


class Constant(DistanceKernel):
    r"""$K = 1$: attention gives the mean of the values.

    >>> Constant().log_kernel(torch.tensor([3.0]))
    tensor([0.])
    """

    def log_kernel(self, squared: Float[Tensor, "*batch t s"]) -> Float[Tensor, "*batch t s"]:
        return 0.0 * squared


def _root(squared: Tensor) -> Tensor:
    """The square root, with the gradient 0 at 0, where the true gradient is infinite."""
    zero = squared == 0
    return torch.where(zero, 0.0, squared.masked_fill(zero, 1.0).sqrt())
