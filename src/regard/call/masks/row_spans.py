"""The keys that each row sees, in memory linear in the lengths.

`RowRanges` is the closed form of a mask of one range for each query: the input of our own kernels. `RowSpans` are the
numbers of each row, from a closed form or from pairs that are read a few rows at a time: they tell the kind of a mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.call.masks.base import Mask, Or
from regard.call.masks.basic import Causal, Lengths, Padding
from regard.call.masks.patterns import Documents, Window
from regard.call.masks.selection import SelectedMask
from regard.call.shapes import Sizes
from regard.tensors.tile_sizes import ranges

FAR = 1 << 30
"""Further than any key, and so no limit."""


@dataclass(frozen=True, slots=True, eq=False)
class RowRanges:
    """The keys of each query i: from max(i + lower, first) to before min(i + upper, stop), and within `keep`."""

    lower: int = -FAR
    upper: int = FAR
    first: Tensor | None = None
    """(B or 1, T), integers; None for no limit."""
    stop: Tensor | None = None
    keep: Tensor | None = None
    """(B or 1, S) of bool; None to keep all keys."""

    @classmethod
    def of(cls, mask: Mask | None, sizes: Sizes, device: torch.device) -> "RowRanges | None":
        """The ranges of a bound mask; None for a mask with other holes.

        >>> from regard.call.masks import causal, lengths
        >>> sizes = Sizes((), 1, 1, 2, 3, False)
        >>> RowRanges.of(causal().bind(sizes, torch.device("cpu")), sizes, torch.device("cpu")).upper
        2
        """
        found = cls()
        for factor in () if mask is None else mask.factors():
            ends = _ends(factor, sizes, device)
            if ends is None and factor.depends_on() <= {"batch", "key"}:
                seen = factor.block(range(1), range(sizes.keys), sizes=sizes, device=device)[:, 0, 0]
                ends = cls(keep=seen.expand(-1, sizes.keys).contiguous())
            if ends is None:
                return None
            found = found._within(ends)
        return found

    def _within(self, other: "RowRanges") -> "RowRanges":
        return RowRanges(
            max(self.lower, other.lower),
            min(self.upper, other.upper),
            _joined(torch.maximum, self.first, other.first),
            _joined(torch.minimum, self.stop, other.stop),
            _joined(torch.logical_and, self.keep, other.keep),
        )

    def _chosen(self, batches: Tensor) -> "RowRanges":
        given = (self.first, self.stop, self.keep)
        first, stop, keep = (t if t is None or len(t) == 1 else t[batches] for t in given)
        return RowRanges(self.lower, self.upper, first, stop, keep)

    def spans(self, sizes: Sizes, device: torch.device) -> "RowSpans":
        here, keys = _places(sizes, device), sizes.keys
        keep = torch.ones((1, keys), dtype=torch.bool, device=device) if self.keep is None else self.keep
        low, stop = here + self.lower, here + self.upper
        low = low if self.first is None else low.maximum(self.first)
        stop = stop if self.stop is None else stop.minimum(self.stop)
        batch = max(len(low), len(stop), len(keep))
        low, stop, keep = (x.expand(batch, -1) for x in (low.clamp(0, keys), stop.clamp(0, keys), keep))
        stop = stop.maximum(low)
        place = torch.arange(keys, device=device).expand_as(keep)
        rank = pad(keep.long().cumsum(-1), (1, 0))
        following = pad(place.masked_fill(~keep, keys), (0, 1), value=keys).flip(-1).cummin(-1)[0].flip(-1)
        preceding = pad(place.masked_fill(~keep, -1), (1, 0), value=-1).cummax(-1)[0]
        count, one = rank.gather(1, stop) - rank.gather(1, low), torch.ones_like(low)
        covered = torch.zeros_like(rank).scatter_add(1, low, one).scatter_add(1, stop, -one).cumsum(-1)
        return RowSpans(
            first=following.gather(1, low).masked_fill(count == 0, keys),
            last=preceding.gather(1, stop).masked_fill(count == 0, -1),
            count=count,
            live=count > 0,
            keys=keep & (covered[:, :keys] > 0),
            shape=(batch, 1),
        )


def _joined(choose: Callable[[Tensor, Tensor], Tensor], one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else choose(one, other)


def _relative(lower: int, upper: int) -> RowRanges:
    return RowRanges(max(lower, -FAR), min(upper, FAR))


def _ends(mask: Mask, sizes: Sizes, device: torch.device) -> RowRanges | None:
    match mask:
        case Causal(offset=Tensor() as offset):
            return RowRanges(stop=_places(sizes, device) + offset[:, None] + 1)
        case Causal(offset=int() as offset):
            return _relative(-FAR, offset + 1)
        case Window(before, after, int() as offset):
            return _relative(offset - before, offset + after + 1)
        case Window(before, after, Tensor() as offset):
            here = _places(sizes, device) + offset[:, None]
            return RowRanges(first=here - before, stop=here + after + 1)
        case Lengths(valid, per_query):
            return RowRanges(stop=valid if per_query else valid[:, None].expand(-1, sizes.queries))
        case Padding(keep):
            return RowRanges(keep=keep.contiguous())
        case Documents() if mask.places is not None:
            return _documents(mask)
        case SelectedMask(inner, Tensor() as batches) if "head" not in inner.depends_on():
            ends = _ends(inner, sizes, device)
            return None if ends is None else ends._chosen(batches)  # noqa: SLF001  (its own)
        case Or(masks):
            found = [_ends(one, sizes, device) for one in masks]
            # Ranges that all begin at the first key combine into one.
            if any(e is None or e.lower > -FAR or e.first is not None or e.keep is not None for e in found):
                return None
            stops = [_stop(ends, sizes, device) for ends in found if ends is not None]
            return RowRanges(stop=reduce(torch.maximum, stops))
    return None


def _places(sizes: Sizes, device: torch.device) -> Tensor:
    return torch.arange(sizes.queries, device=device)[None]


def _stop(ends: RowRanges, sizes: Sizes, device: torch.device) -> Tensor:
    relative = _places(sizes, device) + ends.upper
    return relative if ends.stop is None else torch.minimum(relative, ends.stop)


def _documents(mask: Documents) -> RowRanges | None:
    assert mask.places is not None
    _, key_ids = mask.places.ids
    if bool((key_ids[:, 1:] < key_ids[:, :-1]).any()):
        return None
    keys = mask.key_ids.contiguous()
    queries = mask.ids.contiguous()
    return RowRanges(first=torch.searchsorted(keys, queries), stop=torch.searchsorted(keys, queries, right=True))


@dataclass(frozen=True, eq=False)
class RowSpans:
    """The keys that each row sees, for the C pairs of sequence and head that a mask tells apart."""

    first: Tensor
    """The first key the row sees, (C, T); S if it sees none."""
    last: Tensor
    """The last key the row sees, (C, T); -1 if it sees none."""
    count: Tensor
    """How many keys the row sees, (C, T)."""
    live: Tensor
    """Rows with a key, bool (C, T), less the uniform ones: a model spread these because its mask left them no key."""
    keys: Tensor
    """True for keys visible to any row, bool (C, S); uniform rows do not count."""
    shape: tuple[int, int]
    """(B or 1, H or 1); their product is C."""
    is_exact: bool = True
    """False if it was read from weights, where an allowed key may have the weight 0 too."""

    @classmethod
    def of(cls, mask: Mask | None, sizes: Sizes, device: torch.device) -> "RowSpans | None":
        """Those of a bound mask of one range for each row; None for others, whose pairs are to be read."""
        found = RowRanges.of(mask, sizes, device)
        return None if found is None else found.spans(sizes, device)

    @classmethod
    def read(
        cls, pairs: Callable[[range], tuple[Tensor, Tensor | None]], queries: int, step: int, *, is_exact: bool = True
    ) -> "RowSpans":
        """Those of visible pairs, `step` rows at a time: `pairs` gives them for some rows, bool (B or 1, H or 1, rows,
        S), S at least 1, with the uniform rows (B or 1, H or 1, rows or 1), or None for no such row."""
        parts, keys, shape = [], [], (1, 1)
        for rows in ranges(queries, step):
            seen, even = pairs(rows)
            if even is not None:
                shape = max(len(seen), len(even)), max(seen.shape[1], even.shape[1])
                seen, even = seen.expand(*shape, -1, -1), even.expand(*shape, len(rows)).flatten(0, 1)
            shape, flags = (seen.shape[0], seen.shape[1]), seen.flatten(0, 1).view(torch.uint8)
            end = flags.shape[-1]
            # (The largest place is found many times faster than an index, and in few bytes.)
            place = torch.arange(1, end + 1, dtype=torch.int16 if end < 1 << 15 else torch.int32, device=seen.device)
            first, last = end - (flags * place.flip(0)).amax(-1).long(), (flags * place).amax(-1).long() - 1
            live = last >= 0 if even is None else (last >= 0) & ~even
            parts.append((first, last, flags.sum(-1, dtype=torch.int32), live))
            keys.append((flags if even is None else flags.masked_fill(even[..., None], 0)).amax(-2))
        first, last, count, live = (torch.cat(part, -1) for part in zip(*parts, strict=True))
        return cls(first, last, count, live, torch.stack(keys).amax(0).bool(), shape, is_exact)

    @cached_property
    def without(self) -> Tensor:
        return ~self.live

    @cached_property
    def rank(self) -> Tensor:
        """For each place the number of visible keys before it, (C, S + 1)."""
        return pad(self.keys.long().cumsum(-1), (1, 0))

    @cached_property
    def low(self) -> Tensor:
        return self.rank.gather(1, self.first)

    @cached_property
    def high(self) -> Tensor:
        return self.rank.gather(1, self.last + 1)

    @cached_property
    def is_whole(self) -> Tensor:
        """True for rows that see every visible key from their first to their last, bool (C, T)."""
        return self.count == self.high - self.low

    def before(self, place: Tensor) -> Tensor:
        """The number of visible keys before a place for each row (T,), as (C, T)."""
        return self.rank[:, place.clamp(0, self.keys.shape[-1])]

    def all(self, condition: Tensor) -> bool:
        """Whether all rows with a key meet a condition (C, T)."""
        return bool((condition | self.without).all())

    def most(self, values: Tensor) -> int:
        """The largest of values (C, T) of rows with a key, at least 0."""
        return max(0, int(values.masked_fill(self.without, 0).max()))

    def at(self, values: Tensor, places: Tensor) -> Tensor:
        """The values (C, T) of the rows at places (C, T), where such rows exist."""
        return values.gather(1, places.clamp(0, values.shape[1] - 1))
