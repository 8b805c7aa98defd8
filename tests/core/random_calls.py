"""Random attention calls: one strategy draws everything that a call may be made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.backends import BACKENDS

EVERYDAY = [name for name, backend in BACKENDS.items() if backend.only_by_name is None]
"""What `backend=None` may take; test_flex.py tests the one that compiles for seconds."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# Against float64 on the same numbers: absolute, for values and scores of order 1.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2}
MAP_TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-4}


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

    def to(self, dtype: torch.dtype) -> "Case":
        cast = [t.detach().to(dtype).requires_grad_() for t in self.tensors()]
        bias = None if self.bias is None else self.bias.detach().to(dtype)
        score = self.score
        if is_dataclass(score):
            values = {f.name: getattr(score, f.name) for f in fields(score)}
            score = replace(score, **{n: v.to(dtype) for n, v in values.items() if isinstance(v, Tensor)})
        return Case(*cast, self.mask, self.allowed, bias, score)


PATTERNS = ("window", "right", "middle", "documents", "strided", "blocks", "prefix")


def pattern(kind: str, batch: tuple[int, ...], full: tuple[int, ...], generator: torch.Generator) -> tuple[Any, Tensor]:
    """A mask of regard.mechanisms.masks.patterns, and the dense tensor by hand."""
    queries, keys = full[-2:]
    position, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    size = int(torch.randint(1, 5, (), generator=generator))
    if kind == "window":
        return regard.window(size), ((position - size < j) & (j <= position)).expand(full)
    if kind == "right":
        return regard.window(size, side="right"), ((position + size > j) & (j >= position)).expand(full)
    if kind == "middle":
        return regard.window(2 * size + 1, side="both"), ((j - position).abs() <= size).expand(full)
    if kind == "strided":
        return regard.strided(size), ((j - position).abs() % size == 0).expand(full)
    if kind == "prefix":
        return regard.prefix(size), ((j < size) | (j <= position)).expand(full)
    if kind == "blocks":
        coarse = torch.rand(-(-queries // size), -(-keys // size), generator=generator) < 0.5
        fine = coarse.repeat_interleave(size, 0).repeat_interleave(size, 1)[:queries, :keys]
        return regard.blocks(coarse, size), fine.expand(full)
    ids = torch.randint(0, 3, (*batch, queries), generator=generator)
    key_ids = torch.randint(0, 3, (*batch, keys), generator=generator)
    same = ids[..., :, None] == key_ids[..., None, :]
    same = same.reshape(*batch, *[1] * (len(full) - len(batch) - 2), queries, keys)
    return regard.documents(ids, key_ids=key_ids), same.expand(full)


def random_mask(
    draw: st.DrawFn, batch: tuple[int, ...], full: tuple[int, ...], generator: torch.Generator
) -> tuple[Any, Tensor]:
    """A mask and, written out by hand, the dense tensor that it stands for."""
    queries, keys = full[-2:]
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    lead = len(full) - 2

    def per_sequence(n: Tensor) -> Tensor:
        return n.reshape(*n.shape, *[1] * (lead - n.dim() + 2))

    kind = draw(
        st.sampled_from(["none", "lengths", "per query", "causal", "offset", "padding", "dense", "own", *PATTERNS])
    )
    if kind in PATTERNS:
        return pattern(kind, batch, full, generator)
    if kind == "none":
        return None, torch.ones(full, dtype=torch.bool)
    if kind == "lengths":
        n = torch.randint(0, keys + 1, batch, generator=generator)
        return regard.lengths(n), (j < per_sequence(n)).expand(full)
    if kind == "per query":
        n = torch.randint(0, keys + 1, (*batch, queries), generator=generator)
        shaped = n.reshape(*batch, *[1] * (lead - len(batch)), queries, 1)
        return regard.lengths(n, per_query=True), (j < shaped).expand(full)
    if kind == "causal":
        return regard.causal(), (j <= i + keys - queries).expand(full)
    if kind == "offset":
        offset = draw(st.integers(-queries, keys))
        return regard.causal(offset), (j <= i + offset).expand(full)
    if kind == "padding":
        keep = torch.rand((*batch, keys), generator=generator) < 0.6
        shaped = keep.reshape(*batch, *[1] * (lead - len(batch)), 1, keys)
        return regard.padding(keep), shaped.expand(full)
    if kind == "dense":
        shape = tuple(n if draw(st.booleans()) else 1 for n in full)
        dense = torch.rand(shape, generator=generator) < 0.6
        return dense, dense.expand(full)
    return regard.predicate(lambda b, h, q, k: (q + 2 * k) % 3 > 0), ((i + 2 * j) % 3 > 0).expand(full)


def combined(
    draw: st.DrawFn, batch: tuple[int, ...], full: tuple[int, ...], generator: torch.Generator
) -> tuple[Any, Tensor]:
    mask, allowed = random_mask(draw, batch, full, generator)
    how = draw(st.sampled_from(["alone", "and", "or", "not"]))
    if how == "alone" or not isinstance(mask, regard.Mask):
        return mask, allowed
    if how == "not":
        return ~mask, ~allowed
    other, also = random_mask(draw, batch, full, generator)
    if not isinstance(other, regard.Mask):
        return mask, allowed
    return (mask & other, allowed & also) if how == "and" else (mask | other, allowed | also)


@st.composite
def cases(draw: st.DrawFn, scores: Sequence[str] = ("dot", "scaled", "additive")) -> Case:
    """A call; the masks, ranks, heads, biases and strides vary, the scores are those named."""
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
    if draw(st.booleans()):  # not contiguous
        query, value = query.mT.contiguous().mT, value.mT.contiguous().mT
    full = (*lead_q, queries, keys)
    mask, allowed = combined(draw, batch, full, generator)
    bias = None
    if draw(st.booleans()):
        bias = normal(*(n if draw(st.booleans()) else 1 for n in full))
        bias = bias.masked_fill(torch.rand(bias.shape, generator=generator) < 0.2, -torch.inf)
        allowed = allowed & (bias > -torch.inf)
    kind = draw(st.sampled_from(scores))
    return Case(query, key, value, mask, allowed, bias, SCORES[kind](normal, dim, heads if has_heads else 1))


def _width(normal: Callable[..., Tensor], heads: int) -> Tensor:
    return normal(heads).abs() + 0.5


SCORES = {
    "dot": lambda normal, dim, heads: regard.Dot(),
    "scaled": lambda normal, dim, heads: regard.ScaledDot(),
    "additive": lambda normal, dim, heads: regard.Additive(normal(3), normal(3, dim), normal(3, dim)),
    "cosine": lambda normal, dim, heads: regard.Cosine(_width(normal, heads)),
    "bilinear": lambda normal, dim, heads: regard.Bilinear(normal(dim, dim)),
    "capped": lambda normal, dim, heads: regard.SoftCapped(regard.Dot(), cap=1.5),
    "gaussian": lambda normal, dim, heads: regard.Gaussian(_width(normal, heads)),
    "laplacian": lambda normal, dim, heads: regard.Laplacian(_width(normal, heads)),
    "boxcar": lambda normal, dim, heads: regard.Boxcar(2.0),
    "epanechnikov": lambda normal, dim, heads: regard.Epanechnikov(3 * _width(normal, heads)),
    "triangular": lambda normal, dim, heads: regard.Triangular(3.0),
    "constant": lambda normal, dim, heads: regard.Constant(),
    "custom": lambda normal, dim, heads: lambda q, k: -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1),
}


def scores_by_hand(score: Any, query: Tensor, key: Tensor) -> Tensor:
    """The formula of each score in float64, for key heads already repeated."""

    def per_head(value: Tensor) -> Tensor:
        value = torch.as_tensor(value, dtype=torch.float64)
        return value.reshape(-1, 1, 1) if query.dim() > 3 and value.dim() else value

    products, distance = query @ key.mT, (query[..., :, None, :] - key[..., None, :, :]).norm(dim=-1)
    match score:
        case regard.Additive():
            hidden = (query @ score.query_weight.double().T)[..., :, None, :]
            hidden = hidden + (key @ score.key_weight.double().T)[..., None, :, :]
            return hidden.tanh() @ score.vector.double()
        case regard.Cosine():
            norms = query.norm(dim=-1)[..., :, None] * key.norm(dim=-1)[..., None, :]
            return per_head(score.temperature) * products / norms
        case regard.Bilinear():
            return query @ score.weight.double() @ key.mT
        case regard.SoftCapped():
            return 1.5 * (products / 1.5).tanh()
        case regard.ScaledDot():
            return products * (1.0 if score.scale else query.shape[-1] ** -0.5)
        case regard.Gaussian():
            return -(distance**2) / (2 * per_head(score.width) ** 2)
        case regard.Laplacian():
            return -distance / per_head(score.width)
        case regard.Boxcar():
            return (distance < score.width).double().log()
        case regard.Epanechnikov():
            return (1 - (distance / per_head(score.width)) ** 2).clamp_min(0).log()
        case regard.Triangular():
            return (1 - distance / score.width).clamp_min(0).log()
        case regard.Constant():
            return 0 * products
    return -(query[..., :, None, :] - key[..., None, :, :]).abs().sum(-1)
