"""DeBERTa's disentangled attention: each layer projects the vectors of relative positions that all layers share."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.call.biases.disentangled import Disentangled
from regard.call.masks.base import Mask
from regard.call.scores.base import ScaledDot
from regard.functional import Attended
from regard.nn.arguments import require_sizes
from regard.nn.multi_head import MultiHeadAttention


class RelativeVectors(nn.Module):
    """The vectors P of the 2k relative positions, normalised: (2k, dim).

    Args:
        reach: k.
        dim: the width of the model.
        norm: makes the norm of the vectors.

    Raises:
        ArgumentError: a size is below 1.

    Source: He et al. 2021 (arXiv:2006.03654), section 3.1.

    >>> RelativeVectors(4, 6)().shape
    torch.Size([8, 6])
    """

    def __init__(self, reach: int, dim: int, norm: Callable[[int], nn.Module] = nn.Identity) -> None:
        super().__init__()
        require_sizes(reach=reach, dim=dim)
        self.weight = nn.Parameter(0.02 * torch.randn(2 * reach, dim))
        self.norm = norm(dim)

    def forward(self) -> Float[Tensor, "positions D"]:
        vectors: Tensor = self.norm(self.weight)
        return vectors


class DisentangledAttention(nn.Module):
    r"""Self-attention with $s_{ij} = (q_i \cdot k_j + q_i \cdot K^r_n + k_j \cdot Q^r_n) / \sqrt{3 D}$.

    $K^r$ and $Q^r$ are projections of the vectors P, and n is the row of distance i - j: see `regard.Disentangled`.

    Args:
        dim: width of the input and of the output.
        num_heads: H.
        max_distance: the end of the logarithmic steps, as in `regard.Disentangled`.
        own_projections: whether P has projections of its own; otherwise the queries' and keys' (version 3).
        head_dim: width of one head; by default dim / H.
        dropout: the probability that a weight is dropped in training.

    Raises:
        ArgumentError: a size is below 1, or the heads do not divide.

    Source: He et al. 2021 (arXiv:2006.03654), equation 4; for the shared projections arXiv:2111.09543, appendix A.5.

    >>> attend, vectors = DisentangledAttention(12, 3), RelativeVectors(4, 12)
    >>> attend(torch.randn(2, 5, 12), bias=vectors()).shape
    torch.Size([2, 5, 12])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        max_distance: int | None = None,
        own_projections: bool = False,
        head_dim: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_sizes(dim=dim, num_heads=num_heads)
        width = dim // num_heads if head_dim is None else head_dim
        self.scale = (3 * width) ** -0.5
        score = ScaledDot(self.scale)
        self.content = MultiHeadAttention(dim, num_heads, head_dim=head_dim, dropout=dropout, score=score)
        self.max_distance = max_distance
        self.place = nn.Linear(dim, 2 * num_heads * width) if own_projections else None

    def forward(
        self,
        x: Float[Tensor, "*batch T D"],
        *,
        mask: Mask | Tensor | None = None,
        bias: Float[Tensor, "positions D"],
        return_weights: bool = False,
    ) -> Tensor | Attended:
        """Self-attention.

        Args:
            x: (batch..., T, dim).
            mask: as in `regard.attention`, over (batch..., H, T, T).
            bias: P, the vectors of the 2k relative positions.
            return_weights: also return the weights, an `AttentionMap` of shape (batch..., H, T, T).

        Returns:
            (batch..., T, dim), or the named tuple (output, weights).
        """
        inner = self.content
        if self.place is None:
            queries, keys = (heads[0] for heads in inner.project_heads(bias[None], 0, 1))
        else:
            heads = self.place(bias).unflatten(-1, (2, inner.num_heads, -1))
            queries, keys = heads.permute(1, 2, 0, 3)
        places = Disentangled(keys, queries, self.scale, self.max_distance)
        return inner(x, mask=mask, bias=places, return_weights=return_weights)
