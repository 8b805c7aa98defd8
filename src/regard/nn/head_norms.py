"""The norm of projected queries, keys or values: of each head, or across all heads."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

HeadNorm = Callable[[int], nn.Module]
"""From the width of a vector to the module that normalises it, such as `nn.RMSNorm`."""


@dataclass(frozen=True, slots=True)
class AcrossHeads:
    """One norm of the vector of all heads together, in place of one for each head (OLMo 2).

    Source: OLMo et al. 2024 (arXiv:2501.00656), section 3.3.

    >>> import torch
    >>> from regard.nn import MultiHeadAttention
    >>> attend = MultiHeadAttention(8, 2, qk_norm=AcrossHeads(nn.RMSNorm))
    >>> attend.query_norm.norm.weight.shape, attend(torch.randn(1, 3, 8)).shape
    (torch.Size([8]), torch.Size([1, 3, 8]))
    """

    norm: HeadNorm
    """Makes the norm from the width of all heads."""


class NormAcrossHeads(nn.Module):
    """A norm of heads (batch..., H, T, D) over their H D elements for each position."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, heads: Float[Tensor, "*batch H T D"]) -> Float[Tensor, "*batch H T D"]:
        together = heads.transpose(-3, -2)
        return self.norm(together.flatten(-2)).view_as(together).transpose(-3, -2)


def norm_of_heads(maker: HeadNorm | AcrossHeads | None, heads: int, width: int) -> nn.Module | None:
    if isinstance(maker, AcrossHeads):
        return NormAcrossHeads(maker.norm(heads * width))
    return None if maker is None else maker(width)


def normed(norm: nn.Module, heads: Float[Tensor, "*batch H T D"]) -> Float[Tensor, "*batch H T D"]:
    """The norm of heads, computed in the dtype of its weight: under autocast that is more precise than theirs."""
    dtype = next((weight.dtype for weight in norm.parameters()), heads.dtype)
    answer: Tensor = norm(heads.to(dtype))
    return answer.to(heads.dtype)
