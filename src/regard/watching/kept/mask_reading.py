"""Recognise predicates in the bool and additive masks of torch's functions.

Models pass dense masks to their kernels. Most are padding, causality, a window, or two of these; an equal predicate
needs no memory. Added elements too low for any score (finfo.min, -1e9) are masks too. A row of only such elements is
different: a kernel's weights are uniform there, and the map has to show that.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.call.biases.base import Bias, DenseBias
from regard.call.masks.base import DenseMask, Mask, all_of
from regard.call.masks.row_spans import RowSpans
from regard.call.shapes import Sizes, canonical_pairwise, take
from regard.kernels.base import Call
from regard.maps.sources.factors import NOTHING_HELD
from regard.tensors.fresh import Fresh
from regard.tensors.tile_sizes import fitting
from regard.watching.kept.mask_kind import predicate_of

HIDDEN = -1e8
"""At and below this, neighbouring float32 values are at least 8 apart, and a score added to one is lost."""
CHUNK_ELEMENTS = 1 << 22
"""How many elements of a mask are read at once."""


@dataclass(frozen=True, slots=True, eq=False)
class GivenMask:
    mask: Mask | None = None
    bias: Bias | None = None
    live: Tensor | None = None
    """Rows with a key, bool (B or 1, H or 1, T or 1); None: all rows."""
    even: Tensor | None = None
    """Rows the model spreads evenly over their keys, in the same shape; None: no row."""
    dense: Tensor | None = None
    """The T x S tensor held, if any."""
    fresh: Fresh = NOTHING_HELD
    """The same tensor, as it was."""

    @property
    def bytes(self) -> int:
        return 0 if self.dense is None else self.dense.numel() * self.dense.element_size()

    def holding(self, dense: Tensor, fresh: Fresh) -> "GivenMask":
        if self.bias is not None:
            return replace(self, bias=DenseBias(dense), dense=dense, fresh=fresh)
        return replace(self, mask=DenseMask(dense), dense=dense, fresh=fresh)


def read_mask(tensor: Tensor, sizes: Sizes, *, drops: bool = False, is_learned: bool = False) -> GivenMask:
    """Read a mask that broadcasts to (batch..., H, T, S), or raise ShapeError: additive, or bool, where True keeps a
    key (or drops it, with `drops`). A learned additive mask is a bias with its graph, even where a mask would be
    equal."""
    rank = len(sizes.map_shape)
    tensor = canonical_pairwise(tensor[(None,) * (rank - tensor.dim())], sizes, "the model's mask")
    if tensor.dtype == torch.bool:
        return _recognised(~tensor if drops else tensor, sizes)
    even, is_plain = _survey(tensor)
    if is_plain and not is_learned:
        given = _recognised(tensor > HIDDEN, sizes, even)
        if even is None or given.dense is None:
            return given
    live = (tensor > -torch.inf).any(-1)
    if even is not None:
        top = tensor.amax(-1, keepdim=True)
        flat = torch.where(tensor == top, 0.0, -torch.inf).to(tensor.dtype)
        tensor = torch.where(even[..., None], flat, tensor)
    dense = _if_pairs(tensor)
    bias = DenseBias(tensor.clone() if dense is None and not is_learned else tensor)
    return GivenMask(bias=bias, live=None if bool(live.all()) else live, even=even, dense=dense)


def both(one: GivenMask, other: GivenMask) -> GivenMask | None:
    if any(given.bias is not None or given.even is not None for given in (one, other)):
        return None
    dense = one.dense if one.dense is not None else other.dense
    return GivenMask(mask=all_of(one.mask, other.mask), dense=dense, fresh=one.fresh.joined(other.fresh))


def _survey(tensor: Tensor) -> tuple[Tensor | None, bool]:
    """Find the rows of only hiding elements, at least one of them finite; and whether a bool mask is equal. A bool mask
    is equal if each element is 0 or hides, and each of those rows has one value throughout."""
    rows, is_plain = [], True
    for chunk in _chunks(tensor.detach()):
        top = chunk.amax(-1)
        rows.append((top <= HIDDEN) & (top > -torch.inf))
        is_plain = is_plain and bool(((chunk == 0) | (chunk <= HIDDEN)).all())
        if bool(rows[-1].any()):
            is_plain = is_plain and bool((chunk.amin(-1) == top)[rows[-1]].all())
    even = torch.cat(rows, dim=-1)
    return (even if bool(even.any()) else None), is_plain


def _recognised(keep: Tensor, sizes: Sizes, even: Tensor | None = None) -> GivenMask:
    """The simplest predicate equal to a bool mask (B or 1, H or 1, T or 1, S or 1). The bool mask is False in the
    uniform (`even`) rows, although these see every key."""
    if not keep.numel():
        return GivenMask(live=None if bool(keep.any(-1).all()) else keep.any(-1))
    pairs = keep.expand(*keep.shape[:-1], sizes.keys)

    def read(rows: range) -> tuple[Tensor, Tensor | None]:
        if even is None:
            return take(pairs, rows), None
        spread = even[..., rows.start : rows.stop]
        return take(pairs, rows) | spread[..., None], spread

    seen = RowSpans.read(read, keep.shape[-2], fitting(CHUNK_ELEMENTS >> 2, len(keep) * keep.shape[1] * sizes.keys))
    keys, rows = seen.keys.unflatten(0, seen.shape)[:, :, None], (seen.count > 0).unflatten(0, seen.shape)
    live = None if bool(rows.all()) else rows
    found = predicate_of(seen)
    if found is None:
        return GivenMask(mask=DenseMask(keep), live=live, dense=_if_pairs(keep))
    mask = all_of(*found, None if bool(keys.all()) else DenseMask(keys))
    if mask is not None and even is not None:
        mask = mask | DenseMask(even[..., None])
    return GivenMask(mask=mask, live=live, even=even)


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    return iter(tensor.split(fitting(CHUNK_ELEMENTS, tensor.numel() // tensor.shape[-2]), dim=-2))


def _if_pairs(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.shape[-2] > 1 and tensor.shape[-1] > 1 else None


def masked(call: Call, given: GivenMask, also: Mask | None) -> Call:
    """Put a call under more masks; rows the model spreads evenly get a query of 0."""
    if also is None and given.mask is None and given.bias is None and given.even is None:
        return call
    bound = None if also is None else also.bind(call.sizes, call.query.device)
    query = call.query if given.even is None else call.query.masked_fill(given.even[..., None], 0.0)
    bias = call.bias if given.bias is None else given.bias
    return replace(call, query=query, mask=all_of(call.mask, bound, given.mask), bias=bias)
