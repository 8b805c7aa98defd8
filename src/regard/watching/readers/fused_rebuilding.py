"""Rebuild rows of nn.MultiheadAttention as torch ran it fused, where queries and keys were never seen."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.call.masks.base import Mask, render
from regard.call.normalizations import Softmax
from regard.call.shapes import Sizes, take
from regard.watching.kept.factors import Factors, weighted
from regard.watching.kept.mask_reading import GivenMask
from regard.watching.kept.rebuilding import Rebuilding, Rebuilt
from regard.watching.readers.projections import Projection


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedRebuilding(Rebuilding):
    r"""A few rows cost no projection of all keys: $q_i \cdot (W_K x_j + b_K)$ is $(W_K^\top q_i) \cdot x_j$ and a
    constant of the row, which softmax ignores; and $\sum_j P_{ij} W_V x_j$ is $W_V \sum_j P_{ij} x_j$."""

    projections: tuple[Projection, Projection, Projection]
    """Those of queries, keys and values, of inputs (N, L, E)."""
    num_heads: int
    out: tuple[Tensor, Tensor | None]
    output: Tensor
    """(N, T, E)."""
    sizes: Sizes
    mask: Mask | None
    given: GivenMask
    factors: Factors

    @property
    def queries(self) -> int:
        return self.sizes.queries

    def some(self, rows: range) -> Rebuilt:
        scores, values = self._scores(rows), self.projections[2].input.to(self._dtype)
        weights = Softmax().normalize(scores)[0]
        mixed = (weights.transpose(1, 2).flatten(1, 2) @ values).unflatten(1, (len(rows), -1))
        weight, bias = self._weights(2)
        heads = torch.einsum("nthe,hde->nthd", mixed, weight)
        if bias is not None:
            heads = heads + bias * weights.sum(-1).mT[..., None]
        return self._through_out(heads, take(self.output, rows))

    def whole(self) -> Rebuilt:
        value = self.projections[2].heads(self.num_heads, batch_first=True)
        return self._through_out(weighted(*self.factors.reading, value).transpose(1, 2), self.output)

    def rounding(self, rows: range) -> Tensor:
        peak = self._scores(rows).nan_to_num(posinf=0.0, neginf=0.0).abs().max()
        return peak * 2 * torch.finfo(self.output.dtype).eps

    def _through_out(self, heads: Tensor, output: Tensor) -> Rebuilt:
        weight, bias = (None if t is None else t.to(heads.dtype) for t in self.out)
        assert weight is not None
        return Rebuilt(F.linear(heads.flatten(2), weight, bias), output, output)

    def _scores(self, rows: range) -> Tensor:
        query, key = take(self.projections[0].input, rows).to(self._dtype), self.projections[1].input.to(self._dtype)
        weight, bias = self._weights(0)
        query = torch.einsum("nte,hde->nthd", query, weight)
        query = query if bias is None else query + bias
        through = torch.einsum("nthd,hde->nthe", query * query.shape[-1] ** -0.5, self._weights(1)[0])
        scores = (through.flatten(1, 2) @ key.mT).unflatten(1, (len(rows), -1)).transpose(1, 2)
        columns, even = range(self.sizes.keys), self.given.even
        if even is not None:
            even = even.expand(*even.shape[:-1], self.queries)[..., None]
            scores = scores.masked_fill(take(even, rows), 0.0)
        if self.given.bias is not None:
            scores = scores + self.given.bias.block(rows, columns, query=query, key=key, sizes=self.sizes)
        if self.mask is None:
            return scores
        allowed = render(self.mask, rows, columns, sizes=self.sizes, device=self.output.device)
        return scores.masked_fill(~allowed, -torch.inf)

    def _weights(self, part: int) -> tuple[Tensor, Tensor | None]:
        """The matrix (H, D, E) and the bias (H, D) of one projection."""
        weight, bias = self.projections[part].parts()
        split = (self.num_heads, -1)
        return weight.to(self._dtype).unflatten(0, split), None if bias is None else bias.to(self._dtype).unflatten(
            0, split
        )

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self.output.dtype, torch.float32)
