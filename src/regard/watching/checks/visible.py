"""The visible keys of each row of a watched call: a few integers for each row, in memory linear in T and S.

They follow directly from a mask of a range around each query and of keys hidden from all. Any other mask is rendered a
few rows at a time. Weights computed by the model show visibility as values other than 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.call.biases.base import DenseBias
from regard.call.masks.base import DenseMask, Mask
from regard.call.masks.basic import Causal, Lengths, Padding
from regard.call.masks.patterns import Window
from regard.call.shapes import Sizes, take, take_pairs
from regard.kernels.base import Call
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.source import LinearSource
from regard.tensors.tile_sizes import fitting, ranges
from regard.watching.kept.mask_reading import CHUNK_ELEMENTS, HIDDEN


@dataclass(frozen=True, slots=True, eq=False)
class Visible:
    """The keys each row sees, for the C pairs of sequence and head the mask tells apart."""

    first: Tensor
    """The first key the row sees, (C, T); S if it sees none."""
    last: Tensor
    """The last key the row sees, (C, T); -1 if it sees none."""
    count: Tensor
    """How many keys the row sees, (C, T)."""
    keys: Tensor
    """True for keys visible to any row, bool (C, S); uniform rows do not count."""
    even: Tensor
    """Rows a model spread evenly because its mask left them no key, bool (C, T)."""
    shape: tuple[int, int]
    """(B or 1, H or 1); their product is C."""
    is_exact: bool = True
    """False if it was read from weights, where an allowed key may have the weight 0 too."""

    @property
    def live(self) -> Tensor:
        """Rows with a key, bool (C, T)."""
        return (self.count > 0) & ~self.even


def visible(call: Call, even: Tensor | None) -> Visible:
    """Read who sees whom from the mask and the bias of a call; `even` are the rows the model spread evenly."""
    sizes, device = call.sizes, call.query.device
    by_range = None if call.bias is not None or even is not None else _by_range(call.mask, sizes, device)
    if by_range is not None:
        return by_range
    none = torch.zeros((1, 1, 1), dtype=torch.bool, device=device)

    def read(rows: range) -> tuple[Tensor, Tensor]:
        spread = none if even is None else even if even.shape[-1] == 1 else even[..., rows.start : rows.stop]
        return allowed_pairs(call, rows), spread

    return _by_rows(read, sizes.queries, fitting(CHUNK_ELEMENTS, sizes.flat_batch * sizes.heads * sizes.keys))


def allowed_pairs(call: Call, rows: range) -> Tensor:
    """The pairs that the mask and the bias of a call allow, for some rows: bool (B or 1, H or 1, rows, S)."""
    sizes, columns = call.sizes, range(call.sizes.keys)
    seen = torch.ones((1, 1, len(rows), sizes.keys), dtype=torch.bool, device=call.query.device)
    for factor in () if call.mask is None else call.mask.factors():
        if isinstance(factor, DenseMask) and factor.tensor.dim() == 4:
            # A slice is many times faster than single pairs.
            seen = seen & take_pairs(factor.tensor, rows, columns)
        else:
            seen = seen & call.allowed(factor, rows, columns)
    if isinstance(call.bias, DenseBias):
        vectors = {"query": take(call.query, rows), "key": call.key}
        seen = seen & (call.bias.block(rows, columns, **vectors, sizes=sizes) > HIDDEN)
    return seen


def visible_in(weights: AttentionMap) -> Visible:
    """Read who saw whom from weights a model computed itself, over all heads together."""
    queries, keys = weights.shape[-2:]
    if isinstance(weights.source, LinearSource):
        found = _by_range(weights.source.mask, Sizes((1,), 1, 1, queries, keys, True), weights.device)
        assert found is not None, "it is a range for each query"
        return found
    heads = weights.shape[-3] if weights.dimensions.has_heads_last else 1

    def read(rows: range) -> tuple[Tensor, Tensor]:
        block = weights.block(rows, range(keys)).reshape(-1, heads, len(rows), keys)
        seen = block != 0
        # Where a mask leaves no key, models spread a row evenly over hidden keys; scores give no equal weights.
        spread = (block.amax(-1) == torch.where(seen, block, torch.inf).amin(-1)) & (seen.sum(-1) > 1)
        return seen.any(1, keepdim=True), spread.all(1, keepdim=True)

    found = _by_rows(read, queries, fitting(CHUNK_ELEMENTS, math.prod(weights.leading) * keys))
    return replace(found, is_exact=False)


def _by_rows(read: Callable[[range], tuple[Tensor, Tensor]], queries: int, step: int) -> Visible:
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    shape, keys = (1, 1), None
    for rows in ranges(queries, step):
        seen, spread = read(rows)
        batch, heads = (max(a, b) for a, b in zip(seen.shape[:2], spread.shape[:2], strict=True))
        seen = seen.expand(batch, heads, *seen.shape[2:]).flatten(0, 1)
        spread = spread.expand(batch, heads, len(rows)).flatten(0, 1)
        places = torch.arange(seen.shape[-1], dtype=torch.int32, device=seen.device)
        first, last = torch.where(seen, places, seen.shape[-1]).amin(-1), torch.where(seen, places, -1).amax(-1)
        parts.append((first.long(), last.long(), seen.sum(-1), spread))
        by_any = (seen & ~spread[..., None]).any(-2)
        shape, keys = (batch, heads), by_any if keys is None else keys | by_any
    assert keys is not None
    first, last, count, even = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    return Visible(first, last, count, keys, even, shape)


def _by_range(mask: Mask | None, sizes: Sizes, device: torch.device) -> Visible | None:
    """The visible keys of a mask of one key range per row, less keys hidden from all; None for others. A causal mask, a
    window, padding and lengths, and their combinations, are such masks."""
    queries, keys = torch.arange(sizes.queries, device=device), sizes.keys
    low, stop = torch.zeros_like(queries), torch.full_like(queries, keys)
    keep = torch.ones((1, 1, keys), dtype=torch.bool, device=device)
    for factor in () if mask is None else mask.factors():
        match factor:
            case Causal(int(offset)):
                stop = stop.minimum(queries + offset + 1)
            case Window(before, after, int(offset)):
                low, stop = low.maximum(queries + offset - before), stop.minimum(queries + offset + after + 1)
            case DenseMask(tensor) if tensor.dim() == 4 and tensor.shape[-2] == 1:
                keep = keep & tensor[..., 0, :].expand(-1, -1, keys)
            case Padding(tensor):
                keep = keep & tensor[:, None]
            case Lengths(valid, False):
                keep = keep & (torch.arange(keys, device=device) < valid[:, None, None])
            case _:
                return None
    shape, keep = (keep.shape[0], keep.shape[1]), keep.flatten(0, 1)
    low, stop = low.clamp(0, keys), stop.clamp(0, keys)
    stop = stop.maximum(low)
    place = torch.arange(keys, device=device).expand_as(keep)
    count = torch.nn.functional.pad(keep.long().cumsum(-1), (1, 0))
    following = (
        torch.nn.functional.pad(place.masked_fill(~keep, keys), (0, 1), value=keys).flip(-1).cummin(-1)[0].flip(-1)
    )
    preceding = torch.nn.functional.pad(place.masked_fill(~keep, -1), (1, 0), value=-1).cummax(-1)[0]
    seen = count[:, stop] - count[:, low]
    some, covered = seen > 0, torch.zeros(keys + 1, dtype=torch.long, device=device)
    covered = covered.index_add(0, low, torch.ones_like(low)).index_add(0, stop, -torch.ones_like(stop)).cumsum(0)
    return Visible(
        first=following[:, low].masked_fill(~some, keys),
        last=preceding[:, stop].masked_fill(~some, -1),
        count=seen,
        keys=keep & (covered[:keys] > 0),
        even=torch.zeros_like(some),
        shape=shape,
    )
