"""The divergence of two maps, query by query: the losses of distillation, without either matrix."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from regard.call.masks.base import Mask
from regard.call.masks.basic import Causal
from regard.call.normalizations import Softmax
from regard.call.shapes import repeated, without_autocast
from regard.errors import ArgumentError, ShapeError
from regard.kernels.tiled import Tile
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.call import CallSource
from regard.maps.sources.combined import SeveralSource
from regard.maps.sources.derived import AverageSource
from regard.maps.sources.given import given_weights
from regard.maps.sources.source import Part, Piece, Scratch, Source
from regard.maps.statistics.definitions import LOWEST_LOG, Entropy, PerQuery
from regard.maps.statistics.tiles import ask, product
from regard.tensors.tile_sizes import union

Divergence = Literal["kl", "js", "cross_entropy", "mse", "cosine"]


def divergence(p: AttentionMap | Tensor, q: AttentionMap | Tensor, kind: Divergence = "kl") -> Tensor:
    r"""The divergence of the weights q from the weights p, for each query: (batch..., H, T).

    Args:
        p: a map (batch..., H, T, S), or its rows as a tensor of that shape.
        q: the same of equal shape. One of the two must be a map.
        kind: "kl" $\sum_j p_j \ln (p_j / q_j)$; "js" $\frac12 \mathrm{KL}(p \| m) + \frac12 \mathrm{KL}(q \| m)$ with
            $m = (p + q) / 2$; "cross_entropy" $-\sum_j p_j \ln q_j$; "mse" $\frac1S \sum_j (p_j - q_j)^2$; "cosine"
            $1 - p \cdot q / (\lVert p \rVert \lVert q \rVert)$.

    In nats. "kl" and "cross_entropy" are at least 0 for rows that sum to 1, and inf where p has weight on a key without
    weight in q; "js" is in [0, ln 2], "mse" in [0, 2 / S], "cosine" in [0, 1] (1 if one of the rows is 0, 0 if both
    are). A query without keys in p is 0 in "kl" and "cross_entropy".

    Gradients flow to both sides, in memory linear in T and S; for a teacher give `p.detach()`. If q is a softmax of dot
    products without a bias, and sees all keys of p, "kl" and "cross_entropy" cost one product with p: $-\sum_j p_j \ln
    q_j = \mathrm{lse}_i \sum_j p_j - c\, q_i \cdot (P K)_i$. Everything else is one pass over tiles. For the sum or
    mean over heads take `average()` of either side first.

    Raises:
        ArgumentError: the kind is unknown, or neither side is a map.
        ShapeError: the two are of different shapes.
        NotKeptError: a map has statistics only.

    Source: Kullback & Leibler 1951; Lin 1991 (Jensen-Shannon); Wang et al. 2020 (MiniLM, arXiv:2002.10957), equation 2
    ("kl"); Jiao et al. 2020 (TinyBERT, arXiv:1909.10351), equation 7 ("mse").

    >>> import regard
    >>> x = torch.eye(3)
    >>> teacher = regard.attention(x, x, x, return_weights=True).weights
    >>> student = regard.attention(0 * x, x, x, return_weights=True).weights
    >>> divergence(teacher, student)
    tensor([0.0405, 0.0405, 0.0405])
    >>> divergence(teacher, teacher).abs().max() < 1e-6
    tensor(True)
    """
    if kind not in get_args(Divergence):
        raise ArgumentError(f"kind must be one of {', '.join(get_args(Divergence))}; got {kind!r}")
    first, second = _sources(p, q)
    with without_autocast(first.device):
        found = _found(first, second, kind)
    return torch.where(found < 0, found - found.detach(), found) if _is_at_least_zero(kind, first, second) else found


def _found(p: Source, q: Source, kind: Divergence) -> Tensor:
    """The computed divergence: slightly below 0 by rounding for almost equal rows."""
    at_once = _by_product(p, q) if kind in ("kl", "cross_entropy") else None
    if at_once is None:
        return p.laid_out(ask(Together((p, q)), Compared(q, kind))[0])
    return at_once if kind == "cross_entropy" else at_once - p.laid_out(ask(p, Entropy())[0])


def _is_at_least_zero(kind: Divergence, p: Source, q: Source) -> bool:
    """Whether negative answers come from rounding. Rows that do not sum to 1 may have negative divergences."""
    match kind:
        case "kl":
            return _sums_to_one(p) and _sums_to_one(q)
        case "cross_entropy":
            return _sums_to_one(q)
    return True


def _sums_to_one(source: Source) -> bool:
    match source:
        case CallSource():
            return isinstance(source.call.normalization, Softmax)
        case AverageSource():
            return _sums_to_one(source.of)
    return False


def _sources(p: AttentionMap | Tensor, q: AttentionMap | Tensor) -> tuple[Source, Source]:
    maps = [side for side in (p, q) if isinstance(side, AttentionMap)]
    if not maps or not all(isinstance(side, AttentionMap | Tensor) for side in (p, q)):
        raise ArgumentError(
            f"divergence() compares a map with a map or with a tensor of weights, got {type(p).__name__} and "
            f"{type(q).__name__}"
        )
    if tuple(p.shape) != tuple(q.shape) or p.device != q.device:
        raise ShapeError(
            f"divergence() needs two maps of one shape on one device, got {tuple(p.shape)} on {p.device} and "
            f"{tuple(q.shape)} on {q.device}: average or select heads first"
        )
    for side in maps:
        if not side.source.has_blocks:
            side.source.refuse("divergence()")
    first, second = (side.source if isinstance(side, AttentionMap) else given_weights(side) for side in (p, q))
    return first, second


def _by_product(p: Source, q: Source) -> Tensor | None:
    """The cross entropy by one product with p; None if q is not a plain softmax over all keys of p."""
    if not isinstance(q, CallSource):
        return None
    call = q.call
    scale = call.score.dot_scale(call.query.shape[-1])
    is_plain = type(call.normalization) is Softmax and call.bias is None and scale is not None
    if not is_plain or not (call.mask is None or (isinstance(p, CallSource) and _same(p.call.mask, call.mask))):
        return None
    dtype = torch.promote_types(p.dtype, q.dtype)
    key = repeated(call.key, call.sizes.heads).flatten(0, 1).to(dtype)
    query = call.query.flatten(0, 1).to(dtype)
    # The element after the keys is 1: its mean is the sum of p's row.
    values = torch.nn.functional.pad(key, (0, 1), value=1.0)
    means = product(p, p.laid_out(values))
    means = means.reshape(*query.shape[:-1], means.shape[-1]).to(dtype)
    dots = scale * torch.linalg.vecdot(query, means[..., :-1])
    state = q.state.flatten(0, 1)
    lse = state.masked_fill(state == -torch.inf, 0.0)
    return q.laid_out(lse * means[..., -1] - dots)


def _same(one: Mask | None, other: Mask) -> bool:
    if one is None or len(one.factors()) != len(other.factors()):
        return False
    return all(a is b or _same_causal(a, b) for a, b in zip(one.factors(), other.factors(), strict=True))


def _same_causal(one: Mask, other: Mask) -> bool:
    return (
        isinstance(one, Causal)
        and isinstance(other, Causal)
        and isinstance(one.offset, int)
        and one.offset == other.offset
    )


@dataclass(frozen=True, eq=False)
class Together(SeveralSource):
    parts: tuple[Source, ...]

    @property
    def shape(self) -> torch.Size:
        return self.parts[0].shape

    @property
    def width(self) -> int:
        return sum(part.width for part in self.parts)

    def __str__(self) -> str:
        return f"{self.parts[0]} beside {self.parts[1]}"

    def columns(self, rows: range) -> range:
        return union(part.columns(rows) for part in self.parts)

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        return self.parts[0].part(flat_heads)


@dataclass(frozen=True, slots=True, eq=False)
class Compared(PerQuery):
    """One answer for each query from two rows of weights, p of the source and q of another: (flat_heads, T)."""

    other: Source
    kind: Divergence

    needs_tiles: ClassVar[bool] = True

    @property
    def reads_shares(self) -> bool:  # type: ignore[override]
        return self.kind in ("kl", "js", "cross_entropy")

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        other = self.other.part(tile.flat_heads)(tile.rows, tile.columns)
        dtype = torch.promote_types(piece.weights.dtype, other.weights.dtype)
        return (OF_KIND[self.kind](_in(piece, dtype), _in(other, dtype), self.other.keys),)

    def __str__(self) -> str:
        return f"divergence of kind {self.kind!r}"


def _cross_entropy(p: Piece, q: Piece, keys: int) -> Tensor:
    return -torch.linalg.vecdot(p.weights, _logs(q)) + _beyond(p.weights, q)


def _kullback_leibler(p: Piece, q: Piece, keys: int) -> Tensor:
    return torch.linalg.vecdot(p.weights, _logs(p) - _logs(q)) + _beyond(p.weights, q)


def _jensen_shannon(p: Piece, q: Piece, keys: int) -> Tensor:
    """(KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2. Where p is near q logarithms cancel, and it is
    m (r atanh r + ln(1 - r^2) / 2) with r = (p - q) / (p + q)."""
    of_p, of_q = _logs(p), _logs(q)
    of_m = torch.logaddexp(of_p, of_q) - math.log(2.0)
    far = (p.weights * (of_p - of_m) + q.weights * (of_q - of_m)) / 2
    r = ((of_p - of_q) / 2).tanh()
    near = r.clamp(-0.5, 0.5)
    of_near = (p.weights + q.weights) * (near * near.atanh() + torch.log1p(-near.square()) / 2) / 2
    return torch.where(r.abs() < 0.5, of_near, far).sum(-1)


def _squared_error(p: Piece, q: Piece, keys: int) -> Tensor:
    return (p.weights - q.weights).square().sum(-1) / keys


def _cosine_distance(p: Piece, q: Piece, keys: int) -> Tensor:
    empty_p, empty_q = ((one.weights == 0).all(-1) for one in (p, q))
    # Of unit vectors, |u - v|^2 / 2 is 1 - u . v, without its cancellation.
    u, v = (torch.nn.functional.normalize(one.weights, dim=-1, eps=1e-30) for one in (p, q))
    found = (u - v).square().sum(-1) / 2
    return found.masked_fill(empty_p ^ empty_q, 1.0)


OF_KIND: Mapping[Divergence, Callable[[Piece, Piece, int], Tensor]] = {
    "kl": _kullback_leibler,
    "js": _jensen_shannon,
    "cross_entropy": _cross_entropy,
    "mse": _squared_error,
    "cosine": _cosine_distance,
}
"""One answer for each row (flat_heads, t) of two blocks (flat_heads, t, s) of maps of S keys."""


def _in(piece: Piece, dtype: torch.dtype) -> Piece:
    if piece.weights.dtype == dtype:
        return piece
    logs = None if piece.logs is None else piece.logs.to(dtype)
    return Piece(piece.weights.to(dtype), logs, piece.unit)


def _logs(piece: Piece) -> Tensor:
    """Finite logarithms: 0 times the logarithm of 0 is 0, with its gradient."""
    if piece.logs is not None:
        return (piece.logs * piece.unit).clamp_min(LOWEST_LOG)
    has_weight = piece.weights != 0  # True also for NaN, which stays NaN
    return torch.where(has_weight, torch.where(has_weight, piece.weights, 1.0).log(), LOWEST_LOG)


def _beyond(p: Tensor, q: Piece) -> Tensor:
    """Inf for each row with weight in p on a key hidden in q; 0 for the others."""
    hidden = q.weights == 0 if q.logs is None else q.logs * q.unit <= LOWEST_LOG
    lost = (hidden & (p > 0)).any(-1)
    return torch.zeros_like(lost, dtype=p.dtype).masked_fill(lost, torch.inf)
