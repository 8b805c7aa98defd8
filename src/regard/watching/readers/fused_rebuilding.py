"""Rebuild rows of nn.MultiheadAttention as torch ran it fused, where queries and keys were never seen."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.call.masks.base import Mask, render
from regard.call.normalizations import Softmax
from regard.call.shapes import Sizes, take
from regard.maps.sources.factors import Factors
from regard.watching.kept.mask_reading import GivenMask
from regard.watching.kept.rebuilding import Rebuilding, Rebuilt, rounding_of, weighted
from regard.watching.readers.projections import Projection


@dataclass(frozen=True, slots=True, eq=False)
class EncoderLayerRest:
    """An nn.TransformerEncoderLayer that ran fused, after its attention: shortcut, norms and feed-forward network."""

    layer: nn.TransformerEncoderLayer
    source: Tensor
    """The input (N, T, E)."""
    output: Tensor
    """(N, T, E)."""

    def after(self, attended: Tensor, rows: range) -> Tensor:
        """The output of the layer in a few rows, from that of its attention (N, t, E)."""
        x = take(self.source, rows).to(attended.dtype) + attended
        if self.layer.norm_first:
            return x + self._feed_forward(_norm(self.layer.norm2, x))
        x = _norm(self.layer.norm1, x)
        return _norm(self.layer.norm2, x + self._feed_forward(x))

    def _feed_forward(self, x: Tensor) -> Tensor:
        # The functions in place of the modules: a hook of the model must not run for a row of a proof.
        inner = F.gelu if self.layer.activation_relu_or_gelu == 2 else F.relu
        return _linear(self.layer.linear2, inner(_linear(self.layer.linear1, x)))


def _norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    weight = None if norm.weight is None else norm.weight.to(x.dtype)
    bias = None if norm.bias is None else norm.bias.to(x.dtype)
    return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


def _linear(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight.to(x.dtype), None if linear.bias is None else linear.bias.to(x.dtype))


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
    rest: EncoderLayerRest | None = None
    """The steps after the attention, if `output` is that of an encoder layer."""
    dtype: torch.dtype = field(init=False)
    """That of the computed rows."""
    lengths: Tensor | None = None
    """The lengths (N,) of a nested batch, whose rows beyond them are padding that torch never computed."""

    @property
    def queries(self) -> int:
        return self.sizes.queries

    def some(self, rows: range) -> Rebuilt:
        scores, values = self._scores(rows), self.projections[2].input.to(self.dtype)
        weights = Softmax().normalize(scores)[0].to(values.dtype)
        mixed = (weights.transpose(1, 2).flatten(1, 2) @ values).unflatten(1, (len(rows), -1))
        weight, bias = self._weights(2)
        heads = torch.einsum("nthe,hde->nthd", mixed, weight)
        if bias is not None:
            heads = heads + bias * weights.sum(-1).mT[..., None]
        return self._through_out(heads, rows)

    def whole(self) -> Rebuilt:
        value = self.projections[2].heads(self.num_heads, batch_first=True)
        return self._through_out(weighted(*self.factors.read(), value).transpose(1, 2), range(self.queries))

    def rounding(self, rows: range) -> Tensor:
        return rounding_of(self._scores(rows), self.output.dtype)

    def _through_out(self, heads: Tensor, rows: range) -> Rebuilt:
        weight, bias = self.out
        bias = None if bias is None else bias.to(heads.dtype)
        rebuilt, output = F.linear(heads.flatten(2), weight.to(heads.dtype), bias), take(self.output, rows)
        if self.rest is not None:
            rebuilt = self.rest.after(rebuilt, rows)
        if self.lengths is not None:
            row = torch.arange(rows.start, rows.stop, device=output.device)
            rebuilt = torch.where((row < self.lengths[:, None])[..., None], rebuilt, output)
        return Rebuilt(rebuilt, output, output)

    def _scores(self, rows: range) -> Tensor:
        query, key = take(self.projections[0].input, rows).to(self.dtype), self.projections[1].input.to(self.dtype)
        weight, bias = self._weights(0)
        query = torch.einsum("nte,hde->nthd", query, weight)
        query = query if bias is None else query + bias
        through = torch.einsum("nthd,hde->nthe", query * query.shape[-1] ** -0.5, self._weights(1)[0])
        scores = (through.flatten(1, 2) @ key.mT).unflatten(1, (len(rows), -1)).transpose(1, 2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
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
        return weight.to(self.dtype).unflatten(0, split), None if bias is None else bias.to(self.dtype).unflatten(
            0, split
        )

    def __post_init__(self) -> None:
        # Casts of all weights would be half the cost of a row; bfloat16 has the range of float32, float16 has not.
        given = self.output.dtype
        dtype = given if given == torch.bfloat16 else torch.promote_types(given, torch.float32)
        object.__setattr__(self, "dtype", dtype)
