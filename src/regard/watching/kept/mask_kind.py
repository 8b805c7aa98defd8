"""The kind of a mask, and the predicates equal to it, from the visible keys of its rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.call.masks.base import Mask
from regard.call.masks.basic import causal
from regard.call.masks.patterns import window
from regard.call.masks.row_spans import RowSpans

Pattern = Literal[
    "none",
    "causal",
    "causal from the first key",
    "causal from a position",
    "window",
    "window to both sides",
    "prefix",
    "documents",
    "documents, causal",
    "causal, with blocks of both directions",
    "inverted",
    "no key at all",
    "chosen",
    "dense of no known kind",
]
"""The distinguished patterns. "Inverted" is a causal mask upside down: every row sees only later keys. "Chosen" has as
many of the causal keys in every row, as an indexer leaves.
"""
HiddenAt = Literal["left", "right", "both sides", "inside"]


@dataclass(frozen=True, slots=True)
class MaskKind:
    """The kind of a mask: a pattern of positions, and keys hidden from all rows (padding)."""

    pattern: Pattern
    offset: int
    """Query i is at position offset + i."""
    ahead: int
    """How far after its own position a row sees a key, at most; 0 if none does."""
    size: int | None = None
    """The keys of a window, the keys that a query chose, or the longest prefix."""
    padding: HiddenAt | None = None
    """Where keys are hidden from every row."""
    hidden: int = 0
    """How many keys are hidden from every row, at most, in a sequence."""
    of_weights: bool = False
    """True if it was read from weights, not from a mask."""
    added: str = ""
    """How two values change the scores in place of hiding keys, in a clause; empty for other biases."""
    of_one_query: bool = False
    """True for a single query: its hidden keys may be padding or outside of a window."""

    chooser: str = ""
    """The module that chose the keys of each query; empty if it is not known."""

    is_off_by_one: bool = False
    """True if each row sees all keys up to the one after its own."""

    @property
    def is_unknown(self) -> bool:
        """True for a pattern of no positions: keys hidden from every row need be no padding, as an indexer's."""
        return self.pattern in ("dense of no known kind", "chosen")

    @property
    def tells_positions(self) -> bool:
        return self.pattern not in ("none", "dense of no known kind", "no key at all")

    def __str__(self) -> str:
        """The kind in a few words.

        >>> str(MaskKind("window", 0, 0, size=4, padding="left", hidden=3))
        'window of 4, padding left (3 keys)'
        """
        said: str = self.pattern
        keys = f"{self.hidden} key{'' if self.hidden == 1 else 's'}"
        if self.pattern == "chosen":
            left = f"; {keys} chosen by no query" if self.hidden else ""
            if not self.chooser:
                return f"{self.size} of the causal keys, chosen for each query{left}"
            return f"{self.size} of the causal keys for each query, chosen by {self.chooser}{left}"
        if self.size is not None:
            said = f"window of {self.size}{self.pattern.removeprefix('window')}"
            said = said if self.pattern.startswith("window") else f"{self.pattern} of {self.size}"
            if self.is_off_by_one:
                said = "causal, but off by one: each query sees the next key"
            elif self.pattern == "window to both sides" and self.size != 2 * self.ahead + 1:
                said = f"window of {self.size}, of which {self.ahead} later"
        if self.padding is not None:
            what = "hidden" if self.of_one_query or self.is_unknown else "padding"
            padding = f"{what} {'on ' * (self.padding == 'both sides')}{self.padding} ({keys})"
            said = padding if self.pattern == "none" else f"{said}, {padding}"
        return f"{said}; {self.added}" if self.added else said


def kind_of(seen: RowSpans) -> MaskKind:
    """The simplest fitting pattern. Rows without a key, and rows with uniform weights from the model, do not count."""
    queries, keys = seen.first.shape[-1], seen.keys.shape[-1]
    if not bool(seen.live.any()):
        return MaskKind("no key at all", keys - queries, ahead=0, of_weights=not seen.is_exact)
    pattern, offset, size, low, high = next(_fitting(seen))
    ahead = seen.most(seen.last - _position(seen, offset))
    side, hidden = _hidden(seen.keys, low, high)
    is_off = (pattern, ahead) == ("window to both sides", 1) and queries >= 3 and seen.all(seen.low == 0)
    return MaskKind(
        pattern, offset, ahead, size, side, hidden, not seen.is_exact, of_one_query=queries == 1, is_off_by_one=is_off
    )


def predicate_of(seen: RowSpans) -> tuple[Mask | None] | None:
    """The mask of positions that equals the pairs apart from keys hidden from all rows, None in it for all pairs; None
    for pairs that equal no causal mask and no window. Uniform rows are not compared."""
    sees = seen.count > 0
    for pattern, offset, size, *_ in _fitting(seen):
        here = _position(seen, offset)
        low, stop, mask = torch.zeros_like(here), here + 1, None
        if pattern == "none":
            stop = stop.new_full(stop.shape, seen.keys.shape[-1])
        elif pattern.startswith("causal") and "blocks" not in pattern:
            mask = causal(offset)
        elif pattern == "window" and size is not None:
            low, mask = stop - size, window(size, offset=offset)
        elif pattern == "window to both sides" and size == 2 * (half := seen.most(seen.last - here)) + 1:
            low, stop, mask = here - half, stop + half, window(size, side="both", offset=offset)
        else:
            continue
        # (A pattern fits the rows with a key: those without one have none of it.)
        if bool((sees | (seen.before(stop) <= seen.before(low))).all()):
            return (mask,)
    return None


def _position(seen: RowSpans, offset: int) -> Tensor:
    return torch.arange(seen.first.shape[-1], device=seen.first.device) + offset


Fit = tuple[Pattern, int, int | None, int, int]
"""A pattern, its offset, its size, and the range of its visible keys."""


def _fitting(seen: RowSpans) -> Iterator[Fit]:
    keys = seen.keys.shape[-1]
    whole, end, is_whole = (0, keys), keys - seen.first.shape[-1], seen.all(seen.is_whole)
    sees_first, sees_last = seen.all(seen.low == 0), seen.all(seen.high == seen.rank[:, -1:])
    # A sharp head has weights of 0 on keys its mask allows, so only the first and the last key of each row count.
    if is_whole or not seen.is_exact:
        if sees_first and sees_last:
            yield "none", end, None, *whole
        for offset in dict.fromkeys((end, 0, int(seen.last[:, -1].max()) - seen.first.shape[-1] + 1)):
            yield from _causal(seen, offset, end, sees_first=sees_first)
    if is_whole:
        for offset in dict.fromkeys((end, 0)):
            yield from _both_sides(seen, offset, end, sees_first=sees_first, sees_last=sees_last)
    position, most = _position(seen, end), int(seen.count.max())
    is_causal = seen.is_exact and seen.all(seen.last <= position)
    if is_causal and bool((position >= most).any()) and seen.all(seen.count == (position + 1).clamp(max=most)):
        yield "chosen", end, most, *whole
    yield "dense of no known kind", end, None, *whole


def _causal(seen: RowSpans, offset: int, end: int, *, sees_first: bool) -> Iterator[Fit]:
    position = _position(seen, offset)
    if not seen.all(seen.high == seen.before(position + 1)):
        return
    reach = min(seen.keys.shape[-1], len(position) + offset)
    if sees_first:
        name: Pattern = "causal" if offset == end else "causal from a position"
        yield "causal from the first key" if offset == 0 != end else name, offset, None, 0, reach
        return
    # The widest row shows the width, if padding leaves one row whole.
    width = seen.most(position + 1 - seen.first)
    if seen.all(seen.low == seen.before(position + 1 - width)):
        yield "window", offset, width, max(0, offset + 1 - width), reach
    start = seen.first
    rises = seen.all(start.diff(dim=1, prepend=start[:, :1]) >= 0)
    own = seen.at(start, start - offset) == start
    if rises and seen.all(own | (start < offset)):
        yield "documents, causal", offset, None, 0, reach


def _both_sides(seen: RowSpans, offset: int, end: int, *, sees_first: bool, sees_last: bool) -> Iterator[Fit]:
    position, keys = _position(seen, offset), seen.keys.shape[-1]
    reach, whole = seen.before(position + 1), (0, keys)
    if sees_first:
        # The first row with a key sees the prefix.
        first = seen.live.long().argmax(-1, keepdim=True)
        prefix = seen.high.gather(1, first)
        if seen.all(seen.high == reach.maximum(prefix)):
            yield "prefix", offset, int(seen.last.gather(1, first).max()) + 1, *whole
        blocks = seen.at(seen.last, seen.last - offset) == seen.last
        if seen.all(seen.high >= reach) and seen.all(blocks):
            yield "causal, with blocks of both directions", offset, None, *whole
    for own in (1, 0):
        if sees_last and seen.all(seen.low == seen.before(position + own)):
            yield "inverted", offset, None, max(0, offset + own), keys
    behind, ahead = seen.most(position - seen.first), seen.most(seen.last - position)
    at_right = ahead > 0 and seen.all(seen.high == seen.before(position + ahead + 1))
    if at_right and seen.all(seen.low == seen.before(position - behind)):
        yield "window to both sides", offset, behind + 1 + ahead, max(0, offset - behind), keys
    if end == 0:
        ends = [seen.at(one, other) == one for one in (seen.first, seen.last) for other in (seen.first, seen.last)]
        if all(seen.all(is_end) for is_end in ends) and seen.all((seen.first <= position) & (position <= seen.last)):
            yield "documents", offset, None, *whole


def _hidden(keys: Tensor, low: int, high: int) -> tuple[HiddenAt | None, int]:
    keys = keys[:, low:high]
    hidden = int((~keys).sum(-1).max()) if keys.numel() else 0
    if not hidden:
        return None, 0
    width = keys.shape[-1]
    left = keys.long().argmax(-1)
    right = width - 1 - keys.flip(-1).long().argmax(-1)
    if bool((keys.sum(-1) < (right - left + 1).masked_fill(~keys.any(-1), 0)).any()):
        return "inside", hidden
    some = keys.any(-1)
    at_left, at_right = bool((some & (left > 0)).any()), bool((some & (right < width - 1)).any())
    return "both sides" if at_left and at_right else "left" if at_left else "right", hidden
