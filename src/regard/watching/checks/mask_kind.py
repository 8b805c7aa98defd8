"""The kind of the mask at a kernel, from the visible keys of its rows."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from regard.watching.checks.visible import Visible
from regard.watching.running.observed_call import KeysChosen

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


def chosen_by(kind: MaskKind, seen: Visible, chooser: KeysChosen | None) -> MaskKind:
    """The kind with the module that chose the keys, and how many: padding may leave a row fewer than that."""
    if chooser is None or not kind.is_unknown or kind.ahead or int(seen.count.max()) != chooser.each:
        return kind
    return replace(kind, pattern="chosen", size=chooser.each, chooser=chooser.module)


def kind_of(seen: Visible) -> MaskKind:
    """Infer the kind of a mask. Rows without a key, and rows with uniform weights from the model, do not count.

    Of several fitting patterns, as for a single query, the simplest is returned.

    >>> from regard.watching.checks.visible import visible
    >>> from regard.functional import make_call
    >>> import regard
    >>> x = torch.zeros(1, 1, 5, 2)
    >>> def told(mask):
    ...     call, _ = make_call(x, x, x, score=regard.ScaledDot(), normalization=regard.Softmax(), mask=mask,
    ...                         bias=None, dropout=0.0)
    ...     return str(kind_of(visible(call, None)))
    >>> told(None), told(regard.causal()), told(regard.window(2)), told(regard.prefix(3))
    ('none', 'causal', 'window of 2', 'prefix of 3')
    >>> told(regard.causal() & regard.lengths(torch.tensor([3])))
    'causal, padding right (2 keys)'
    >>> told(~regard.causal()), told(regard.chosen(torch.tensor([[0, -1], [0, 1], [0, 2], [1, 3], [0, 4]])))
    ('inverted', '2 of the causal keys, chosen for each query')
    """
    rows = _Rows(seen)
    if not bool(rows.live.any()):
        return MaskKind("no key at all", rows.end, ahead=0, of_weights=not seen.is_exact)
    pattern, offset, size, low, high = next(_fitting(rows))
    ahead = rows.most(seen.last - rows.position(offset))
    side, hidden = _hidden(seen.keys, low, high)
    is_off = (pattern, ahead) == ("window to both sides", 1) and rows.queries >= 3 and rows.all(rows.first == 0)
    return MaskKind(
        pattern, offset, ahead, size, side, hidden, not seen.is_exact, of_one_query=rows.queries == 1,
        is_off_by_one=is_off,
    )  # fmt: skip


class _Rows:
    """The keys of each row, counted in visible keys: padding is thus no part of the pattern."""

    def __init__(self, seen: Visible) -> None:
        self.seen, self.live = seen, seen.live
        self.queries, self.keys = seen.first.shape[-1], seen.keys.shape[-1]
        self.end = self.keys - self.queries
        self.rank = torch.nn.functional.pad(seen.keys.long().cumsum(-1), (1, 0))
        """For each place the number of seen keys before it, (C, S + 1)."""
        self.total = self.rank[:, -1:]
        self.first = self.rank.gather(1, seen.first.clamp(0, self.keys))
        self.stop = self.rank.gather(1, (seen.last + 1).clamp(0, self.keys))
        self.is_whole = self.all(seen.count == self.stop - self.first)
        """True if each row sees all keys from its first to its last."""

    def position(self, offset: int) -> Tensor:
        return torch.arange(self.queries, device=self.live.device) + offset

    def before(self, place: Tensor) -> Tensor:
        """The number of seen keys before a place for each row (T,), as (C, T)."""
        return self.rank[:, place.clamp(0, self.keys)]

    def all(self, condition: Tensor) -> bool:
        return bool((condition | ~self.live).all())

    def most(self, values: Tensor) -> int:
        """The largest of the values (C, T) of the rows with a key, at least 0."""
        return max(0, int(values.masked_fill(~self.live, 0).max()))

    def at(self, values: Tensor, places: Tensor) -> Tensor:
        """The values (C, T) of the rows at positions (C, T), where such rows exist."""
        return values.gather(1, places.clamp(0, self.queries - 1))


Fit = tuple[Pattern, int, int | None, int, int]
"""A pattern, its offset, its size, and the range of its visible keys."""


def _fitting(rows: _Rows) -> Iterator[Fit]:
    """The patterns that fit, the simplest first; the last one always does."""
    whole, offset = (0, rows.keys), rows.end
    sees_first, sees_last = rows.all(rows.first == 0), rows.all(rows.stop == rows.total)
    # A sharp head has weights of 0 on keys its mask allows, so only the first and the last key of each row count.
    if rows.is_whole or not rows.seen.is_exact:
        if sees_first and sees_last:
            yield "none", offset, None, *whole
        for offset in dict.fromkeys((rows.end, 0, int(rows.seen.last[:, -1].max()) - rows.queries + 1)):
            yield from _causal(rows, offset, sees_first=sees_first)
    if rows.is_whole:
        for offset in dict.fromkeys((rows.end, 0)):
            yield from _both_sides(rows, offset, sees_first=sees_first, sees_last=sees_last)
    position, count = rows.position(rows.end), rows.seen.count
    most, is_causal = int(count.max()), rows.seen.is_exact and rows.all(rows.seen.last <= position)
    if is_causal and bool((position >= most).any()) and rows.all(count == (position + 1).clamp(max=most)):
        yield "chosen", rows.end, most, *whole
    yield "dense of no known kind", rows.end, None, *whole


def _causal(rows: _Rows, offset: int, *, sees_first: bool) -> Iterator[Fit]:
    position = rows.position(offset)
    if not rows.all(rows.stop == rows.before(position + 1)):
        return
    reach = min(rows.keys, rows.queries + offset)
    if sees_first:
        name: Pattern = "causal" if offset == rows.end else "causal from a position"
        yield "causal from the first key" if offset == 0 != rows.end else name, offset, None, 0, reach
        return
    # The widest row shows the width, if padding leaves one row whole.
    width = rows.most(position + 1 - rows.seen.first)
    if rows.all(rows.first == rows.before(position + 1 - width)):
        yield "window", offset, width, max(0, offset + 1 - width), reach
    start = rows.seen.first
    rises = rows.all(start.diff(dim=1, prepend=start[:, :1]) >= 0)
    own = rows.at(start, start - offset) == start
    if rises and rows.all(own | (start < offset)):
        yield "documents, causal", offset, None, 0, reach


def _both_sides(rows: _Rows, offset: int, *, sees_first: bool, sees_last: bool) -> Iterator[Fit]:
    position, seen = rows.position(offset), rows.seen
    reach, whole = rows.before(position + 1), (0, rows.keys)
    if sees_first:
        # The first row with a key sees the prefix.
        first = rows.live.long().argmax(-1, keepdim=True)
        prefix = rows.stop.gather(1, first)
        if rows.all(rows.stop == reach.maximum(prefix)):
            yield "prefix", offset, int(seen.last.gather(1, first).max()) + 1, *whole
        blocks = rows.at(seen.last, seen.last - offset) == seen.last
        if rows.all(rows.stop >= reach) and rows.all(blocks):
            yield "causal, with blocks of both directions", offset, None, *whole
    for own in (1, 0):
        if sees_last and rows.all(rows.first == rows.before(position + own)):
            yield "inverted", offset, None, max(0, offset + own), rows.keys
    behind, ahead = rows.most(position - seen.first), rows.most(seen.last - position)
    at_right = ahead > 0 and rows.all(rows.stop == rows.before(position + ahead + 1))
    if at_right and rows.all(rows.first == rows.before(position - behind)):
        yield "window to both sides", offset, behind + 1 + ahead, max(0, offset - behind), rows.keys
    if rows.end == 0:
        ends = [rows.at(one, other) == one for one in (seen.first, seen.last) for other in (seen.first, seen.last)]
        if all(rows.all(end) for end in ends) and rows.all((seen.first <= position) & (position <= seen.last)):
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
