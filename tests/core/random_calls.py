"""Random attention calls: one strategy draws everything that a call may be made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import FunctionType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.kernels import BACKENDS
from tests.fuzz.core.masks import random_mask
from tests.fuzz.core.parts import Sides
from tests.fuzz.drawing import Drawn

EVERYDAY = list(BACKENDS)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# Against float64 on the same numbers: absolute, for values and scores of order 1.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2}
MAP_TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 5e-6}


@dataclass
class Case:
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    allowed: Tensor
    """The mask by hand, dense: (batch..., H, T, S) or what the rank of the input makes of it."""
    bias: Tensor | None
    score: Any

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def options(self) -> dict[str, Any]:
        return {"mask": self.mask, "bias": self.bias, "score": self.score}

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> "Case":
        device = self.query.device if device is None else device
        query, key, value = (t.detach().to(device, dtype).requires_grad_() for t in self.tensors())
        bias = None if self.bias is None else self.bias.detach().to(device, dtype)
        score = self.score
        if is_dataclass(score) and not isinstance(score, type):
            values = {f.name: getattr(score, f.name) for f in fields(score)}
            score = replace(score, **{n: v.to(device, dtype) for n, v in values.items() if isinstance(v, Tensor)})
        mask = self.mask.to(device) if isinstance(self.mask, Tensor) else self.mask
        return Case(query, key, value, mask, self.allowed.to(device), bias, score)


def combined(draw: Any, sides: Sides, masks: Sequence[str] = ()) -> tuple[Any, Tensor]:
    """A mask of `tests.fuzz.core.masks`, alone or joined with others, and its bools; the first is one of `masks`."""
    found = random_mask(Drawn(draw), sides, first=masks)
    return found.mask, found.allowed.expand(sides.flat_full).reshape(sides.full)


@st.composite
def cases(draw: st.DrawFn, scores: Sequence[str] = ("dot", "scaled", "additive"), masks: Sequence[str] = ()) -> Case:
    """A call; ranks, heads, biases and strides vary; the scores are those named, and so are the masks, if any is."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    batch = draw(st.sampled_from([(), (1,), (3,), (2, 3)]))
    groups = draw(st.sampled_from([1, 2])) if len(batch) else 1
    heads = groups * draw(st.sampled_from([1, 3])) if len(batch) else 1
    has_heads = len(batch) > 1 or (len(batch) == 1 and draw(st.booleans()))
    queries, keys = draw(st.sampled_from([1, 2, 5, 19])), draw(st.sampled_from([1, 3, 7, 23]))
    dim, width = draw(st.sampled_from([1, 4, 5])), draw(st.sampled_from([1, 4, 6]))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    lead_q, lead_k = ((*batch, heads), (*batch, groups)) if has_heads else (batch, batch)
    query, key, value = normal(*lead_q, queries, dim), normal(*lead_k, keys, dim), normal(*lead_k, keys, width)
    if batch and draw(st.sampled_from([False, False, False, True])):  # one sequence for the whole batch
        one = draw(st.sampled_from(["query", "key", "value", "key and value"]))
        query = query[:1] if one == "query" else query
        key, value = key[:1] if "key" in one else key, value[:1] if "value" in one else value
    if draw(st.booleans()):  # not contiguous
        query, value = query.mT.contiguous().mT, value.mT.contiguous().mT
    full = (*lead_q, queries, keys)
    sides = Sides(batch, heads if has_heads else 1, groups, queries, keys, dim, width, has_heads)
    mask, allowed = combined(draw, sides, masks)
    bias = None
    if draw(st.booleans()):
        bias = normal(*(n if draw(st.booleans()) else 1 for n in full))
        bias = bias.masked_fill(torch.rand(bias.shape, generator=generator) < 0.2, -torch.inf)
        allowed = allowed & (bias > -torch.inf)
    kind = draw(st.sampled_from(scores))
    return Case(query, key, value, mask, allowed, bias, SCORES[kind](normal, dim, heads if has_heads else 1))


def _width(normal: Callable[..., Tensor], heads: int) -> Tensor:
    return normal(heads).abs() + 0.5


SCORES: dict[str, Callable[[Callable[..., Tensor], int, int], Any]] = {
    "dot": lambda normal, dim, heads: regard.Dot(),
    "scaled": lambda normal, dim, heads: regard.ScaledDot(),
    "additive": lambda normal, dim, heads: regard.Additive(normal(3), normal(3, dim), normal(3, dim)),
    "cosine": lambda normal, dim, heads: regard.Cosine(_width(normal, heads)),
    "bilinear": lambda normal, dim, heads: regard.Bilinear(normal(dim, dim)),
    "capped": lambda normal, dim, heads: regard.SoftCapped(regard.Dot(), cap=1.5),
    "gaussian": lambda normal, dim, heads: regard.call.scores.Gaussian(_width(normal, heads)),
    "laplacian": lambda normal, dim, heads: regard.call.scores.Laplacian(_width(normal, heads)),
    "boxcar": lambda normal, dim, heads: regard.call.scores.Boxcar(2.0),
    "epanechnikov": lambda normal, dim, heads: regard.call.scores.Epanechnikov(3 * _width(normal, heads)),
    "triangular": lambda normal, dim, heads: regard.call.scores.Triangular(3.0),
    "constant": lambda normal, dim, heads: regard.call.scores.Constant(),
    "custom": lambda normal, dim, heads: lambda q, k: -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1),
}
"""Each score, from `normal(*shape)`, the width D of queries and keys, and the number of heads."""


def _per_head(value: Any, query: Tensor) -> Tensor:
    value = torch.as_tensor(value, dtype=torch.float64)
    return value.reshape(-1, 1, 1) if query.dim() > 3 and value.dim() else value


def _distance(query: Tensor, key: Tensor) -> Tensor:
    return (query[..., :, None, :] - key[..., None, :, :]).norm(dim=-1)


def _additive(score: Any, query: Tensor, key: Tensor) -> Tensor:
    hidden = (query @ score.query_weight.double().T)[..., :, None, :]
    hidden = hidden + (key @ score.key_weight.double().T)[..., None, :, :]
    return hidden.tanh() @ score.vector.double()


FORMULAS: dict[type, Callable[[Any, Tensor, Tensor], Tensor]] = {
    regard.ScaledDot: lambda score, q, k: q @ k.mT * (1.0 if score.scale else q.shape[-1] ** -0.5),
    regard.Additive: _additive,
    regard.call.scores.Gaussian: lambda score, q, k: -(_distance(q, k) ** 2) / (2 * _per_head(score.width, q) ** 2),
    FunctionType: lambda score, q, k: -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1),
}
"""The formulas of some scores in float64, for key heads already repeated; `tests.fuzz.core.scores` has one of each."""

ROUNDING: set[type] = {regard.Additive}
"""Scores that project the vectors in the input's dtype, as any linear layer does: bf16 weights differ more by that."""


def scores_by_hand(score: Any, query: Tensor, key: Tensor) -> Tensor:
    return FORMULAS[type(score)](score, query, key)
