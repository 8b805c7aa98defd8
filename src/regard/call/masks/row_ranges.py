"""Masks as one range of keys for each query, in memory linear in the lengths: the input of our own kernels."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.call.masks.base import Mask, Or, render
from regard.call.masks.basic import Causal, Lengths
from regard.call.masks.patterns import Documents, Window
from regard.call.masks.selection import SelectedMask
from regard.call.shapes import Sizes

Ends = tuple[Tensor | None, Tensor | None]
"""The first key and the one after the last, (B or 1, T) each; None for those of all keys."""


@dataclass(frozen=True, slots=True, eq=False)
class RowRanges:
    """The keys of each query: from `first` to before `stop`, and within `keep`."""

    first: Tensor
    """(B or 1, T) of int32, from 0 to S."""
    stop: Tensor
    keep: Tensor | None
    """(B or 1, S) of bool; None to keep all keys."""

    @classmethod
    def of(cls, mask: Mask | None, sizes: Sizes, device: torch.device) -> "RowRanges | None":
        """The ranges of a bound mask; None for a mask with other holes.

        >>> from regard.call.masks import causal, lengths
        >>> sizes = Sizes((), 1, 1, 2, 3, False)
        >>> seen = RowRanges.of(causal().bind(sizes, torch.device("cpu")), sizes, torch.device("cpu"))
        >>> seen.first.tolist(), seen.stop.tolist()
        ([[0, 0]], [[2, 3]])
        """
        first, stop, keep = None, None, None
        for factor in () if mask is None else mask.factors():
            if factor.depends_on() <= {"batch", "key"}:
                seen = render(factor, range(1), range(sizes.keys), sizes=sizes, device=device)[:, 0, 0]
                seen = seen.expand(-1, sizes.keys)
                keep = seen if keep is None else keep & seen
                continue
            ends = _ends(factor, sizes, device)
            if ends is None:
                return None
            first, stop = _joined(torch.maximum, first, ends[0]), _joined(torch.minimum, stop, ends[1])
        nothing = torch.zeros(1, sizes.queries, dtype=torch.int64, device=device)
        first, stop = nothing if first is None else first, nothing + sizes.keys if stop is None else stop
        both = torch.broadcast_tensors(first, stop)
        limits = (end.clamp(0, sizes.keys).to(torch.int32).contiguous() for end in both)
        return cls(next(limits), next(limits), keep if keep is None else keep.contiguous())


def _joined(choose: Callable[[Tensor, Tensor], Tensor], one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else choose(one, other)


def _ends(mask: Mask, sizes: Sizes, device: torch.device) -> Ends | None:
    i = torch.arange(sizes.queries, device=device)[None]
    match mask:
        case Causal(offset=Tensor() as offset):
            return None, i + offset[:, None] + 1
        case Causal(offset=int() as offset):
            return None, i + offset + 1
        case Window(before, after, int() as offset):
            return i + offset - before, i + offset + after + 1
        case Window(before, after, Tensor() as offset):
            return i + offset[:, None] - before, i + offset[:, None] + after + 1
        case Lengths(valid, per_query):
            return None, valid if per_query else valid[:, None].expand(-1, sizes.queries)
        case Documents() if mask.places is not None:
            return _documents(mask)
        case SelectedMask(inner, batches, _) if "head" not in inner.depends_on():
            ends = _ends(inner, sizes, device)
            return None if ends is None else (_taken(ends[0], batches), _taken(ends[1], batches))
        case Or(masks):
            found = [_ends(one, sizes, device) for one in masks]
            # Ranges that all begin at the first key combine into one.
            if any(ends is None or ends[0] is not None or ends[1] is None for ends in found):
                return None
            stop = None
            for ends in found:
                stop = _joined(torch.maximum, stop, None if ends is None else ends[1])
            return None, stop
    return None


def _taken(end: Tensor | None, batches: Tensor) -> Tensor | None:
    return end if end is None or len(end) == 1 else end[batches]


def _documents(mask: Documents) -> Ends | None:
    """The first and last key of each query's document, if documents are contiguous."""
    assert mask.places is not None
    _, key_ids = mask.places.ids
    if bool((key_ids[:, 1:] < key_ids[:, :-1]).any()):
        return None
    keys = mask.key_ids.contiguous()
    queries = mask.ids.contiguous()
    return torch.searchsorted(keys, queries), torch.searchsorted(keys, queries, right=True)
