"""The share of each query's weight within a mask."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.call.masks.base import And, DenseMask, Mask, Not, Or
from regard.call.masks.basic import as_mask
from regard.call.masks.selection import SelectedMask
from regard.call.normalizations import Softmax
from regard.call.shapes import Sizes, index_tensor
from regard.errors import ArgumentError
from regard.kernels import execute
from regard.kernels.tiled import Tile
from regard.maps.sources.call import CallSource
from regard.maps.sources.row_shift import ShiftedBias
from regard.maps.sources.source import PartOf, Piece, Source
from regard.maps.statistics.definitions import PerQuery
from regard.maps.statistics.tiles import ask


def kept_mass(source: Source, mask: Mask | Tensor) -> Tensor:
    """The sum of the weights within a mask, (batch..., H, T). See `AttentionMap.mass`."""
    chosen = as_mask(mask)
    if chosen is None:
        raise ArgumentError("mass() needs a mask, such as regard.window(8) or a bool tensor; got None")
    sizes = sizes_of(source)
    bound = _bound(chosen, source.part_of, sizes, source.device)
    found = _by_lse(source, bound, sizes) if isinstance(source, CallSource) else None
    return source.laid_out(ask(source, Mass(bound, sizes))[0] if found is None else found)


def _bound(mask: Mask, part: PartOf, sizes: Sizes, device: torch.device) -> Mask:
    """A mask bound to a map. A tensor has the shape of the map; a predicate is that of the whole."""
    if part.is_whole or isinstance(mask, DenseMask):
        return mask.bind(sizes, device)
    if isinstance(mask, And | Or):
        return type(mask)(tuple(_bound(one, part, sizes, device) for one in mask.masks))
    if isinstance(mask, Not):
        return Not(_bound(mask.mask, part, sizes, device))
    whole = mask.bind(replace(sizes, queries=part.queries, keys=part.keys), device)
    rows, columns = (index_tensor(places, device) for places in (part.rows, part.columns))
    return SelectedMask(whole, rows=rows, columns=columns)


def sizes_of(source: Source) -> Sizes:
    leading, has_heads = source.leading, source.dimensions.has_heads_last
    heads = leading[-1] if has_heads else 1
    return Sizes(leading[:-1] if has_heads else leading, heads, heads, source.queries, source.keys, has_heads)


def _by_lse(source: CallSource, mask: Mask, sizes: Sizes) -> Tensor | None:
    """exp(lse under both masks - lse), one fused call; None if the map is no softmax, or is a choice of flat_heads."""
    call, state = source.factors.read()
    shares_sizes = (call.sizes.flat_batch, call.sizes.heads) == (sizes.flat_batch, sizes.heads)
    if not isinstance(call.normalization.base, Softmax) or not shares_sizes:
        return None
    if isinstance(call.bias, ShiftedBias):  # The kernels do not support shifted rows.
        return None
    both = mask if call.mask is None else And((*call.mask.factors(), *mask.factors()))
    key = call.key.to(call.compute_dtype)
    narrower = replace(
        call, query=call.query.to(key.dtype), key=key, normalization=Softmax(), mask=both, dropout=0.0
    )  # fmt: skip
    _, lse = execute(source.backend, narrower, key.new_zeros(*key.shape[:-1], 1))
    dead = lse == -torch.inf
    state = state.masked_fill(dead, 0.0)
    return torch.exp(lse.masked_fill(dead, 0.0) - state).masked_fill(dead, 0.0).flatten(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Mass(PerQuery):
    """sum_j P_ij over the keys of a mask: (flat_heads, T)."""

    mask: Mask
    sizes: Sizes

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        flat_heads = torch.arange(tile.flat_heads.start, tile.flat_heads.stop, device=piece.weights.device)
        mask = SelectedMask(self.mask, flat_heads // self.sizes.heads, flat_heads % self.sizes.heads)
        sizes = replace(self.sizes, batch=(len(flat_heads),), heads=1, kv_heads=1, has_heads=False)
        allowed = mask.block(tile.rows, tile.columns, sizes=sizes, device=flat_heads.device)[:, 0]
        return ((piece.weights * allowed).sum(-1),)

    def __str__(self) -> str:
        return f"mass({self.mask})"
