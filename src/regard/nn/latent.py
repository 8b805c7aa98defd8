"""Multi-head latent attention: keys and values of all heads from one short vector for each position."""

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from regard.call.biases.base import Bias
from regard.call.masks.base import Mask
from regard.call.masks.basic import causal
from regard.call.rotary.rotary import Rotary
from regard.call.scores.base import ScaledDot
from regard.errors import ArgumentError
from regard.functional import Attended, attention
from regard.nn.cache import KeyValue, Past
from regard.nn.head_norms import HeadNorm
from regard.tensors.kinds import refuse_wrong_kinds
from regard.tensors.ranges import require_sizes


@refuse_wrong_kinds
class LatentAttention(nn.Module):
    r"""Self-attention whose keys and values are $W_k^h c_t$ and $W_v^h c_t$, with one latent $c_t$ for all heads.

    A key is $[W_k^h c_t; r_t]$ with a rotated part $r_t$ that all heads share, and a query is $[q^h; r^h]$. The cache
    holds $[c_t; r_t]$ alone. `extend` attends to it in the absorbed form, $q^h \cdot W_k^h c_t = (W_k^{h\top} q^h)
    \cdot c_t$: the weights are those of the expanded form of `forward`.

    Args:
        dim: width of the input and of the output.
        num_heads: H.
        latent_dim: the width of c.
        head_dim: the width of a head's part without positions.
        value_dim: the width of a head's value; by default `head_dim`.
        rotary: rotates the part with positions, whose width it has.
        scale: of the scores; by default $1 / \sqrt{head\_dim + rotary.dim}$.
        norm: makes the norm of the latents.
        bias: whether the projection into the latents and the last one have biases.

    Raises:
        ArgumentError: a size is below 1.

    Source: DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1 and appendix C.

    >>> import regard
    >>> attend = LatentAttention(16, 4, latent_dim=6, head_dim=4, rotary=regard.Rotary(2))
    >>> x = torch.randn(1, 5, 16)
    >>> first, cache = attend.extend(x[:, :3], None)
    >>> last, cache = attend.extend(x[:, 3:], cache)
    >>> torch.allclose(torch.cat([first, last], 1), attend(x, mask=regard.causal()), atol=1e-6)
    True
    >>> cache.key.shape  # 6 + 2 numbers for each position
    torch.Size([1, 1, 5, 8])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        latent_dim: int,
        head_dim: int,
        rotary: Rotary,
        value_dim: int | None = None,
        scale: float | None = None,
        norm: HeadNorm = nn.RMSNorm,
        bias: bool = False,
    ) -> None:
        super().__init__()
        value_dim = head_dim if value_dim is None else value_dim
        require_sizes(dim=dim, num_heads=num_heads, latent_dim=latent_dim, head_dim=head_dim, value_dim=value_dim)
        if not isinstance(rotary, Rotary):
            raise ArgumentError(f"rotary= takes a regard.Rotary for the part with positions, got {rotary!r}")
        self.num_heads, self.latent_dim, self.head_dim, self.rotary = num_heads, latent_dim, head_dim, rotary
        self.score = ScaledDot((head_dim + rotary.dim) ** -0.5 if scale is None else scale)
        width = num_heads * (head_dim + rotary.dim)
        self.query = nn.Linear(dim, width, bias=False)
        self.latent = nn.Linear(dim, latent_dim + rotary.dim, bias=bias)
        self.latent_norm = norm(latent_dim)
        self.key = nn.Parameter(torch.empty(num_heads, head_dim, latent_dim))
        self.value = nn.Parameter(torch.empty(num_heads, value_dim, latent_dim))
        self.out = nn.Linear(num_heads * value_dim, dim, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot uniform for each matrix, and zero biases; the matrices of the heads count as one."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for heads in (self.key, self.value):
            nn.init.xavier_uniform_(heads.detach().flatten(0, 1))

    def forward(
        self,
        x: Float[Tensor, "*batch T D"],
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        return_weights: bool = False,
        past: Past | None = None,
    ) -> Tensor | Attended:
        """Self-attention in the expanded form; after those of a cache, in the absorbed one.

        Args:
            x: (batch..., T, dim).
            mask: as in `regard.attention`, over (batch..., H, T, T).
            bias: an additive term of the scores, of the same shapes.
            return_weights: also return the weights, an `AttentionMap` of shape (batch..., H, T, T).
            past: the earlier positions; see `extend`, which returns no weights.

        Returns:
            (batch..., T, dim), or the named tuple (output, weights).
        """
        if past is not None:
            return self._absorbed(x, past, mask, bias)
        plain, turned = self._queries(x, 0)
        latent, place = self._latents(x, 0).split((self.latent_dim, self.rotary.dim), -1)
        keys = latent @ self.key.mT
        attended = attention(
            torch.cat([plain, turned], -1),
            torch.cat([keys, place.expand(*keys.shape[:-1], -1)], -1),
            latent @ self.value.mT,
            score=self.score,
            mask=mask,
            bias=bias,
            return_weights=return_weights,
        )
        if not isinstance(attended, Attended):
            return self.out(attended.transpose(-3, -2).flatten(-2))
        return Attended(self.out(attended.output.transpose(-3, -2).flatten(-2)), attended.weights)

    def extend(
        self,
        x: Float[Tensor, "*batch T D"],
        cache: KeyValue | None,
        *,
        mask: Mask | Tensor | None = causal(),  # noqa: B008  (frozen, without state)
        bias: Bias | Tensor | None = None,
        offset: int | Integer[Tensor, "*batch"] | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """Self-attention of the positions after those of a cache, in the absorbed form.

        Arguments are those of `MultiHeadAttention.extend`. The keys of the cache are $[c_t; r_t]$, (batch..., 1, S,
        latent_dim + rotary.dim), and its values are empty.
        """
        past = Past(cache, offset)
        return self(x, mask=mask, bias=bias, past=past), past.cache

    def _absorbed(self, x: Tensor, past: Past, mask: Mask | Tensor | None, bias: Bias | Tensor | None) -> Tensor:
        plain, turned = self._queries(x, past.offset)
        latents = self._latents(x, past.offset)
        longer = past.append(KeyValue.of(latents, latents[..., :0]))
        query, latent = torch.cat([plain @ self.key, turned], -1), longer.key[..., : self.latent_dim]
        output = attention(query, longer.key, latent, score=self.score, mask=mask, bias=bias)
        made: Tensor = self.out((output @ self.value.mT).transpose(-3, -2).flatten(-2))
        return made

    def _queries(self, x: Tensor, offset: int | Tensor) -> tuple[Tensor, Tensor]:
        """Heads (batch..., H, T, ...) without and with positions."""
        heads = self.query(x).unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)
        plain, turned = heads.split((self.head_dim, self.rotary.dim), -1)
        return plain, self.rotary.rotate(turned, offset)

    def _latents(self, x: Tensor, offset: int | Tensor) -> Tensor:
        """[c; r] of each position, (batch..., 1, T, latent_dim + rotary.dim)."""
        latent, place = self.latent(x)[..., None, :, :].split((self.latent_dim, self.rotary.dim), -1)
        return torch.cat([self.latent_norm(latent), self.rotary.rotate(place, offset)], -1)
