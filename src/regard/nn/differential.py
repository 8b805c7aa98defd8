"""Differential attention: the difference of two softmax maps."""

import math

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from regard.call.masks.base import Mask
from regard.call.masks.basic import causal
from regard.call.rotary.rotary import Rotary
from regard.errors import ArgumentError
from regard.functional import Attended, attention
from regard.nn.cache import KeyValue, Past
from regard.tensors.kinds import refuse_wrong_kinds
from regard.tensors.ranges import require_sizes


@refuse_wrong_kinds
class DifferentialAttention(nn.Module):
    r"""$O_h = (1 - \lambda_0)\,\mathrm{norm}((P^1_h - \lambda P^2_h) V_h)$ with two softmax maps for each head.

    $\lambda = \exp(\lambda_{q1} \cdot \lambda_{k1}) - \exp(\lambda_{q2} \cdot \lambda_{k2}) + \lambda_0$ is learned,
    and begins at $\lambda_0 = 0.8 - 0.6 e^{-0.3 n}$ in layer n.

    Args:
        dim: width of the input and of the output.
        num_heads: H; each head has two queries and two keys of width dim / (2 H), and one value of twice that width.
        layer: n, from 0.
        rotary: rotates queries and keys by their positions.

    Raises:
        ArgumentError: a size is below 1, dim is no multiple of 2 H, or the rotation is of another width.

    Source: Ye et al. 2024 (arXiv:2410.05258), equations 1 to 3.

    >>> import regard
    >>> attend = DifferentialAttention(16, 2, layer=0)
    >>> output, weights = attend(torch.randn(1, 5, 16), mask=regard.causal(), return_weights=True)
    >>> output.shape, weights.shape
    (torch.Size([1, 5, 16]), torch.Size([1, 4, 5, 5]))
    """

    def __init__(self, dim: int, num_heads: int, *, layer: int, rotary: Rotary | None = None) -> None:
        super().__init__()
        require_sizes(dim=dim, num_heads=num_heads)
        if dim % (2 * num_heads) or layer < 0:
            raise ArgumentError(
                f"dim must be a multiple of twice num_heads, and layer at least 0; got {dim}, {num_heads} and {layer}"
            )
        self.num_heads, self.head_dim = num_heads, dim // (2 * num_heads)
        if rotary is not None and rotary.dim != self.head_dim:
            raise ArgumentError(f"rotary must turn heads of width {self.head_dim}, got Rotary({rotary.dim})")
        self.rotary, self.start = rotary, 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.inputs, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.lambdas = nn.Parameter(torch.empty(4, self.head_dim))  # q1, k1, q2, k2
        self.norm = nn.RMSNorm(2 * self.head_dim, eps=1e-5)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot uniform for the matrices, N(0, 0.1^2) for the vectors of lambda."""
        for weight in (*self.inputs.weight.chunk(3), self.out.weight):
            nn.init.xavier_uniform_(weight.detach())
        nn.init.normal_(self.lambdas, std=0.1)

    @property
    def share(self) -> Float[Tensor, ""]:
        """Lambda: the share of the second map that is taken from the first."""
        first, second = (self.lambdas[0::2].float() * self.lambdas[1::2].float()).sum(-1)
        return first.exp() - second.exp() + self.start

    def forward(
        self,
        x: Float[Tensor, "*batch T D"],
        *,
        mask: Mask | Tensor | None = None,
        return_weights: bool = False,
        past: Past | None = None,
    ) -> Tensor | Attended:
        """Self-attention.

        Args:
            x: (batch..., T, dim).
            mask: as in `regard.attention`.
            return_weights: also return the two maps of each head, (batch..., 2 H, T, T): head 2h is the first map of
                head h, and head 2h + 1 the second.
            past: the earlier positions; see `extend`.

        Returns:
            (batch..., T, dim), or the named tuple (output, weights).
        """
        past = Past() if past is None else past
        query, key, value = self._project(x, past.offset)
        longer = past.append(KeyValue.of(key, value))
        attended = attention(query, longer.key, longer.value, mask=mask, return_weights=return_weights)
        if not isinstance(attended, Attended):
            return self._read(attended)
        return Attended(self._read(attended.output), attended.weights)

    def extend(
        self,
        x: Float[Tensor, "*batch T D"],
        cache: KeyValue | None,
        *,
        mask: Mask | Tensor | None = causal(),  # noqa: B008  (frozen, without state)
        offset: int | Integer[Tensor, "*batch"] | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """Self-attention of the positions after those of a cache; see `MultiHeadAttention.extend`."""
        past = Past(cache, offset)
        return self(x, mask=mask, past=past), past.cache

    def _project(self, x: Tensor, offset: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.inputs(x).chunk(3, -1)
        heads = [part.unflatten(-1, (2 * self.num_heads, -1)).transpose(-3, -2) for part in (query, key)]
        if self.rotary is not None:
            heads = [self.rotary.rotate(part, offset) for part in heads]
        values = value.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2).repeat_interleave(2, -3)
        return heads[0], heads[1], values

    def _read(self, output: Tensor) -> Tensor:
        first, second = output.unflatten(-3, (-1, 2)).unbind(-3)
        heads = self.norm(first - self.share.to(second.dtype) * second) * (1 - self.start)
        return self.out(heads.transpose(-3, -2).flatten(-2))
