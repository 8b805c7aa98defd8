"""Measure how alike maps are: the heads of one layer, or two maps of one shape."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard.call.shapes import without_autocast
from regard.errors import ArgumentError, ShapeError, require
from regard.lazy import displayed
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.source import Scratch, Source
from regard.maps.statistics.tiles import TILE_ELEMENTS, TILE_ROWS
from regard.tensors.tile_sizes import fitting, ranges, tile_shape


@displayed
class Difference(NamedTuple):
    """How far two maps are apart, query by query."""

    jensen_shannon: Tensor
    """(batch..., H, T), in nats, in [0, ln 2] for rows that sum to 1."""
    total_variation: Tensor
    r"""(batch..., H, T): $\frac12 \sum_j |P_{ij} - Q_{ij}|$, in [0, 1]."""
    largest: Tensor
    r"""(batch..., H, T): $\max_j |P_{ij} - Q_{ij}|$, in [0, 1]."""


@torch.no_grad()
def difference(one: AttentionMap, other: AttentionMap) -> Difference:
    r"""Measure how far two maps P and Q of one shape are apart: of two models, or of one before and after a change.

    The Jensen-Shannon divergence of a query's rows is $H(\frac{p + q}{2}) - \frac{H(p) + H(q)}{2}$. A row with no
    key in both maps is 0 in all three statistics. It goes by tiles, in memory linear in T and S, and takes no gradient.

    Args:
        one: a map (batch..., H, T, S).
        other: a map of the same shape, dtype and device.

    Raises:
        ShapeError: the shapes, dtypes or devices differ.

    Source: Lin 1991, "Divergence measures based on the Shannon entropy", equation 4.1.

    >>> import regard
    >>> q = torch.zeros(2, 1)
    >>> full = regard.attention(q, q, q, return_weights=True).weights
    >>> causal = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
    >>> difference(full, causal).total_variation
    tensor([0.5000, 0.0000])
    """
    for each in (one, other):
        require(each, AttentionMap, "each map", "an AttentionMap")
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        raise ShapeError(
            "maps that are compared must be of one shape, dtype and device, got "
            f"{tuple(one.shape)} {one.dtype} on {one.device} and {tuple(other.shape)} {other.dtype} on {other.device}"
        )
    found: list[list[tuple[Tensor, ...]]] = []
    with without_autocast(one.device):
        for p, q, at in _side_by_side(one.source, other.source):
            if not at:
                found.append([])
            apart = (p - q).abs()
            found[-1].append((_jensen_shannon(p, q), apart.sum(-1) / 2, apart.amax(-1)))
    groups = [tuple(torch.cat(pieces, 1) for pieces in zip(*tiles, strict=True)) for tiles in found]
    return Difference(*(one.source.laid_out(torch.cat(pieces)) for pieces in zip(*groups, strict=True)))


@torch.no_grad()
def agreement(of: AttentionMap, how: Literal["cosine", "jensen-shannon"] = "cosine") -> Tensor:
    r"""Measure how alike the heads of a map are: (batch..., H, H), symmetric.

    Args:
        of: a map (batch..., H, T, S) with weights of at least 0.
        how: "cosine" for $\langle P_a, P_b \rangle / (\lVert P_a \rVert \lVert P_b \rVert)$ with all weights of a
            head as one vector, in [0, 1], 1 for equal heads; "jensen-shannon" for the mean over queries of the
            divergence of their rows in nats, in [0, ln 2], 0 for equal heads (Clark et al. 2019, arXiv:1906.04341,
            section 6). Queries with no key count as agreement.

    Memory is linear in T and S. The cost grows with H^2 for "jensen-shannon". It takes no gradient.

    Raises:
        ShapeError: the map has no heads.
        ArgumentError: `how` is neither.

    >>> import regard
    >>> q = torch.zeros(1, 2, 2, 1)
    >>> q[0, 1] = torch.tensor([[20.0], [-20.0]])
    >>> weights = regard.attention(q, torch.tensor([[1.0], [-1.0]]).expand(1, 2, 2, 1), q, return_weights=True).weights
    >>> agreement(weights[0]).shape
    torch.Size([2, 2])
    """
    require(of, AttentionMap, "of", "an AttentionMap")
    if of.dimensions.head is None:
        of.source.require_heads("agreement()")
        raise ShapeError(
            f"agreement() compares the heads of a map (batch..., H, T, S), got {tuple(of.shape)} {of.dimensions}"
        )
    of = of.with_heads()
    if how not in ("cosine", "jensen-shannon"):
        raise ArgumentError(f"how must be 'cosine' or 'jensen-shannon', got {how!r}")
    heads, queries = of.leading[-1], of.shape[-2]
    source, scratch, alike = of.source, Scratch(), []
    for first in range(0, source.flat_heads, heads):
        total = torch.zeros(heads, heads, dtype=of.dtype, device=of.device)
        with without_autocast(of.device):
            for weights in _rows(source, range(first, first + heads), scratch):
                total += _alike(weights, how)
        alike.append(total)
    found = torch.stack(alike)
    if how == "jensen-shannon":
        return (found / queries).reshape(*of.leading, heads)
    norms = found.diagonal(dim1=-2, dim2=-1).sqrt()
    scale = norms[:, :, None] * norms[:, None]
    return (found / scale.where(scale > 0, 1.0)).reshape(*of.leading, heads)


def _alike(weights: Tensor, how: str) -> Tensor:
    """The products of the heads (H, H), or their divergences, of some rows (H, t, S)."""
    if how == "cosine":
        flat = weights.flatten(1)
        return flat @ flat.mT
    return torch.stack([_jensen_shannon(head, weights).sum(-1) for head in weights])


def _jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """The divergence of rows in the last dimension. With m = (p + q) / 2 and r = (p - q) / (p + q) its terms are
    m ((1 + r) ln(1 + r) + (1 - r) ln(1 - r)) / 2; a difference of entropies would cancel where p is near q."""
    total = p + q
    r = (p - q) / torch.where(total > 0, total, 1.0)
    near, far = r.clamp(-0.5, 0.5), torch.special.xlog1py(1 + r, r) + torch.special.xlog1py(1 - r, -r)
    parts = torch.where(r.abs() < 0.5, 2 * near * near.atanh() + torch.log1p(-near.square()), far)
    return (total * parts).sum(-1) / 4


def _rows(source: Source, flat_heads: range, scratch: Scratch) -> Iterator[Tensor]:
    step = fitting(TILE_ELEMENTS, len(flat_heads) * source.keys * source.width)
    part = source.part(flat_heads, scratch)
    for rows in ranges(source.queries, step):
        yield part(rows, range(source.keys)).weights


def _side_by_side(one: Source, other: Source) -> Iterator[tuple[Tensor, Tensor, int]]:
    """The weights (flat_heads, t, S) of both maps, a few rows at a time, and the index of the first row."""
    row_size = one.keys * (one.width + other.width)
    few, _ = tile_shape(one.flat_heads, one.queries, row_size, budget=TILE_ELEMENTS, few_rows=TILE_ROWS)
    scratches = [(source, Scratch()) for source in (one, other)]
    for flat_heads in ranges(one.flat_heads, few):
        parts = [source.part(flat_heads, scratch) for source, scratch in scratches]
        for rows in ranges(one.queries, fitting(TILE_ELEMENTS, len(flat_heads) * row_size)):
            p, q = (part(rows, range(one.keys)).weights for part in parts)
            yield p, q, rows.start
