r"""The statistics of a softmax of dot products by calls of attention alone.

With $P_{ij} = \exp(c\, q_i \cdot k_j + b_j + r_i - \mathrm{lse}_i)$, at most a bias per key and one per query:

    P x                  attention with the values x
    P^T x                attention of the keys to the queries, each with the bias r_i - lse_i, times exp(its lse + b_j)
    sum_i P_ij           exp(the lse of that call + b_j)
    -sum_j P_ij ln P_ij  lse_i - r_i - c q_i . (P K)_i - (P b)_i
    sum_j P_ij^2         exp(lse of the doubled scores - 2 lse), for the participation ratio

Each is one call of a fused kernel, with its gradient, in memory linear in T and S. (The column sums follow
awslabs/keys_values, pull request 77.)
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.call.biases.base import Bias, BlockBias, DenseBias
from regard.call.masks.base import And, Mask
from regard.call.masks.basic import Causal
from regard.call.masks.selection import swapped
from regard.call.normalizations import Softmax
from regard.call.scores.base import ScaledDot
from regard.call.shapes import Rows, Sizes
from regard.kernels import execute
from regard.kernels.base import Backend, Call
from regard.kernels.fused_plan import plan


@dataclass(frozen=True, slots=True, eq=False)
class DotSoftmax:
    """A softmax of scaled dot products with a bias per key and per query, and its lse."""

    call: Call
    """In the map's dtype, without dropout."""
    state: Tensor
    """lse (B, H, T), including the sink."""
    backend: Backend
    scale: float
    per_key: Tensor | None
    """b (B or 1, H or 1, 1, S)."""
    per_query: Tensor | None
    """r (B or 1, H or 1, T)."""

    @classmethod
    def of(cls, call: Call, state: Tensor, backend: Backend) -> "DotSoftmax | None":
        scale = call.score.dot_scale(call.query.shape[-1])
        if not scale or not isinstance(call.normalization, Softmax):
            return None
        per_key = per_query = None
        if call.bias is not None:
            if not isinstance(call.bias, DenseBias) and any(t.requires_grad for t in call.bias.learned()):
                return None
            covering = plan(call)
            per_key, per_query = None if covering.bias is None else covering.bias.per_key, covering.per_row
            if per_key is None:
                return None
            per_key = per_key.to(call.compute_dtype).expand(*per_key.shape[:-1], call.sizes.keys)
        dtype = call.compute_dtype
        call = replace(call, query=call.query.to(dtype), key=call.key.to(dtype), dropout=0.0)
        return cls(call, state, backend, scale, per_key, per_query)

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp, with 0 for rows without keys: their weights are 0 for any value."""
        return self.state.masked_fill(self.state == -torch.inf, 0.0)

    @property
    def has_sink(self) -> bool:
        return self.call.normalization.base is not self.call.normalization

    def row_sums(self) -> Tensor:
        """sum_j P_ij (B, H, T): 1 for live rows, less with a sink, 0 for rows without keys."""
        if not self.has_sink:
            return (self.state > -torch.inf).to(self.state.dtype)
        key = self.call.key
        return execute(self.backend, self.call, key.new_ones(*key.shape[:-1], 1))[0][..., 0]

    def entropy(self) -> Tensor:
        """-sum_j P_ij ln P_ij (B, H, T), in one call with K and b as values."""
        call, key = self.call, self.call.key
        sums = self.row_sums()
        found = (self.lse if self.per_query is None else self.lse - self.per_query.to(self.lse.dtype)) * sums
        if self.per_key is not None:
            call = call.expanded()
            finite = self.per_key.masked_fill(self.per_key == -torch.inf, 0.0)
            key = torch.cat([call.key, finite.mT.expand(*call.key.shape[:-1], 1)], -1)
        means, _ = execute(self.backend, call, key)
        found = found - self.scale * torch.linalg.vecdot(call.query, means[..., : call.query.shape[-1]])
        found = found if self.per_key is None else found - means[..., -1]
        # No weight is above 1, so a negative result comes from rounding and becomes 0; the gradient is unchanged.
        return found + (found.clamp_min(0.0) - found).detach()

    def participation_ratio(self) -> tuple[Tensor, Tensor]:
        """(sum_j P_ij)^2 / sum_j P_ij^2 and sum_j P_ij (B, H, T), from logarithms: squares of small weights vanish."""
        plain, doubled = self.state, self._doubled_lse()
        if self.has_sink:
            _, plain = execute(self.backend, replace(self.call, normalization=Softmax()), self._nothing(self.call.key))
        dead = doubled == -torch.inf
        plain, doubled = plain.masked_fill(dead, 0.0), doubled.masked_fill(dead, 0.0)
        ratio = torch.exp(2 * plain - doubled).masked_fill(dead, 0.0)
        return ratio, torch.exp(plain - self.lse).masked_fill(dead, 0.0)

    def _doubled_lse(self) -> Tensor:
        bias = None if self.call.bias is None else Doubled(self.call.bias)
        doubled = replace(self.call, score=ScaledDot(2 * self.scale), normalization=Softmax(), bias=bias)
        return execute(self.backend, doubled, self._nothing(self.call.key))[1]

    def transposed(self, x: Tensor) -> Tensor:
        """P^T x (B, H, S, N) for x (B, H, T, N), in one call with the roles swapped."""
        means, logs = self._swapped(x)
        return means * torch.exp(logs)[..., None]

    def received(self) -> Tensor:
        """sum_i P_ij (B, H, S), from the log-sum-exp of that call."""
        _, logs = self._swapped(self._nothing(self.call.query))
        return torch.exp(logs)

    @staticmethod
    def _nothing(like: Tensor) -> Tensor:
        return like.new_zeros(*like.shape[:-1], 1)

    def _swapped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        call, sizes = self.call.expanded(), self.call.sizes
        bias = (-self.lse if self.per_query is None else self.per_query.to(self.lse.dtype) - self.lse) / self.scale
        # The bias is one more dimension of the vectors, as a path for its gradient.
        key = torch.cat([call.query, bias[..., None]], -1)
        query = torch.cat([call.key, torch.ones_like(call.key[..., :1])], -1)
        factors = () if call.mask is None else call.mask.factors()
        # A mask without the query empties whole columns of P, at the end. Rows without keys need no mask: each of their
        # pairs is excluded by the mask, or is in such a column.
        columns = tuple(m for m in factors if "query" not in m.depends_on())
        mask, is_flipped = _mask_of_swapped(tuple(m for m in factors if m not in columns), sizes)
        if is_flipped:
            query, key, x = query.flip(-2), key.flip(-2), x.flip(-2)
        roles = replace(sizes, queries=sizes.keys, keys=sizes.queries, kv_heads=sizes.heads)
        swapped_call = replace(
            call, query=query, key=key, score=ScaledDot(self.scale), normalization=Softmax(), mask=mask, bias=None,
            sizes=roles,
        )  # fmt: skip
        means, logs = execute(self.backend, swapped_call, x)
        if is_flipped:
            means, logs = means.flip(-2), logs.flip(-1)
        if self.per_key is not None:
            logs = logs + self.per_key.squeeze(-2)
        if columns:
            allowed = call.allowed(columns[0] if len(columns) == 1 else And(columns), range(1), range(sizes.keys))
            logs = logs.masked_fill(~allowed.squeeze(-2), -torch.inf)
        return means, logs


def _mask_of_swapped(factors: tuple[Mask, ...], sizes: Sizes) -> tuple[Mask | None, bool]:
    """Reversed, a causal mask stays causal: the usual offset S - T becomes 0, the kernel's own flag."""
    if not factors:
        return None, False
    offset = factors[0].offset if len(factors) == 1 and isinstance(factors[0], Causal) else None
    if isinstance(offset, int | torch.SymInt) and offset == sizes.keys - sizes.queries:
        return Causal(0), True
    masks = tuple(swapped(mask) for mask in factors)
    return masks[0] if len(masks) == 1 else And(masks), False


@dataclass(frozen=True, slots=True, eq=False)
class Doubled(BlockBias):
    bias: Bias

    def learned(self) -> tuple[Tensor, ...]:
        return self.bias.learned()

    def split(self, sizes: Sizes, device: torch.device, *, causal: bool) -> tuple[Tensor, Tensor | None] | None:
        parts = self.bias.split(sizes, device, causal=causal)
        return None if parts is None else (2 * parts[0], None if parts[1] is None else 2 * parts[1])

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        return 2 * self.bias.block(rows, columns, query=query, key=key, sizes=sizes)

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        return Doubled(self.bias.select(batches, heads))
