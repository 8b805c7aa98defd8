"""Masks as one range of keys for each query, in memory linear in the lengths: the input of our own kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from regard.call.masks.base import Mask, Or, render
from regard.call.masks.basic import Causal, Lengths, Padding
from regard.call.masks.patterns import Documents, Window
from regard.call.masks.selection import SelectedMask
from regard.call.shapes import Sizes

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
                seen = render(factor, range(1), range(sizes.keys), sizes=sizes, device=device)[:, 0, 0]
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
