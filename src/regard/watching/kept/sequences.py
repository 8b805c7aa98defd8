"""Find the sequences of a module's calls: the steps of a generation, recognised by their keys.

A call with T queries continues another one if its keys are those of the other, from the first or from a later key on (a
sliding window), followed by T new ones. So each key has a position in its sequence of calls, even if a cache has
dropped some. A call without this evidence begins a new sequence, with a reason.

Cross-attention reuses the same keys at each step. Such a call continues another one if it has other queries, and if the
self-attention of the same step continues too, or the keys are still in the same memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.watching.kept.evidence import Prints, ViewedMemory, same_rows

QUEUED = 1024
"""How many calls wait at most to be placed, with their fingerprints."""
OPEN = 16
"""How many sequences of a module may wait for their next call. Their fingerprints are held until then."""


class Moment(NamedTuple):
    thread: int
    at: int
    """How many calls its thread had observed until then, this one included."""
    begun: int | None
    """How many it had observed when the model itself was called; None outside such a call, as in a method of it."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceStep:
    call: int
    """The number of the call among those of its module."""
    when: Moment
    start: int
    """The place of its first key among all keys of the sequence."""
    first: int
    origins: Tensor | None = None
    """The possible parent rows of each row in the step before, bool (B, C); None: each row its own."""
    alike: Tensor | None = None
    """Rows of the batch with equal new keys and queries, bool (B, B); None: each row its own."""
    filled: int | None = None
    """The number of its keys before the zeros at the end of a buffer; None if unknown."""


@dataclass(slots=True, eq=False)
class CallSequence:
    steps: list[SequenceStep]
    why: str
    """Why the first call it does not share with another sequence does not continue one."""
    grows: bool | None = None
    """True if calls add keys (self-attention), False if all have the same (cross-attention); None after one call."""


@dataclass(slots=True, eq=False)
class _End:
    sequence: CallSequence
    known: Tensor
    """The fingerprints of all its keys so far (B, total, n); for cross-attention those of its last call."""
    queries: Tensor
    memory: ViewedMemory
    order: int

    @property
    def last(self) -> SequenceStep:
        return self.sequence.steps[-1]


@dataclass(slots=True)
class _Found:
    end: _End
    start: int
    kept: int
    """How many of its keys are not new."""
    origins: Tensor
    cut: int | None = None
    """The length of the cache after a cut before the call; None without one."""


@dataclass(slots=True, eq=False)
class _LastResult:
    """The last result of self-attention in a step: the sequence continues or begins anew, and the parent rows."""

    at: int
    origins: Tensor | None


class _Waiting(NamedTuple):
    call: int
    printed: Callable[[], Prints | None]
    when: Moment


@dataclass(slots=True, eq=False)
class Sequences:
    _of: dict[str, list[CallSequence]] = field(default_factory=dict)
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    """The first call of each module without a second one."""
    _queued: list[tuple[str, _Waiting]] = field(default_factory=list)
    """Calls in their order, to be placed when the sequences are read: reading a fingerprint waits for its device."""
    _ends: dict[str, list[_End]] = field(default_factory=dict)
    _told: dict[int, _LastResult] = field(default_factory=dict)
    _count: int = 0

    @property
    def of(self) -> dict[str, list[CallSequence]]:
        for name in tuple(self._waiting):
            self._settle(name)
        self._place_queued()
        return self._of

    def wait(self, name: str, call: int, printed: Callable[[], Prints | None], when: Moment) -> bool:
        """Save the first call of a module without its fingerprints; True if it is the first. Most models run once under
        a watch. Fingerprints are made when the module is called again, or when the sequences are read."""
        if name in self._of or name in self._waiting:
            return False
        self._waiting[name] = _Waiting(call, printed, when)
        return True

    def queue(self, name: str, call: int, printed: Callable[[], Prints | None], when: Moment) -> None:
        self._queued.append((name, _Waiting(call, printed, when)))
        if len(self._queued) >= QUEUED:
            self._place_queued()

    def _place_queued(self) -> None:
        queued, self._queued = self._queued, []
        for name, waiting in queued:
            self._place_waiting(name, waiting)

    def _settle(self, name: str) -> None:
        waiting = self._waiting.pop(name, None)
        if waiting is not None:
            self._place_waiting(name, waiting)

    def _place_waiting(self, name: str, waiting: _Waiting) -> None:
        try:
            prints = waiting.printed()
        except RuntimeError:
            # Tensors without data (FakeTensor) cannot be compared.
            prints = None
        self._place(name, waiting.call, prints, waiting.when)

    def add(self, name: str, call: int, prints: Prints | None, when: Moment) -> int | None:
        self._settle(name)
        return self._place(name, call, prints, when)

    def _place(self, name: str, call: int, prints: Prints | None, when: Moment) -> int | None:
        if prints is None:
            self._begin(name, call, None, when, "nothing is known of its keys by which it could be told")
            return None
        # Two calls of each step make two sequences: of those of the latest step, the oldest continues first.
        ends = sorted(self._ends.setdefault(name, []), key=lambda end: (-(end.last.when.begun or 0), end.order))
        # The zeros at the end may be new keys, and not room.
        whole = replace(prints, filled=prints.keys.shape[1])
        found, why = self._grown(whole, ends), ""
        if found is not None:
            prints = whole
        elif prints.filled < whole.filled:
            found = self._grown(prints, ends)
        if found is None:
            found, why = self._fixed(prints, ends, when)
        if found is None:
            self._begin(name, call, prints, when, why)
            return None
        return self._go_on(name, call, prints, when, found)

    def _grown(self, prints: Prints, ends: list[_End]) -> _Found | None:
        kept = prints.filled - prints.queries.shape[1]
        for end in ends if kept > 0 else ():
            start = end.known.shape[1] - kept
            if end.sequence.grows is not False and start >= 0:
                origins = _origins(prints.keys[:, :kept], end.known[:, start:])
                if origins is not None:
                    return _Found(end, start, kept, origins)
        return None

    def _fixed(self, prints: Prints, ends: list[_End], when: Moment) -> tuple[_Found | None, str]:
        kept, why = prints.filled - prints.queries.shape[1], ""
        for end in ends:
            if end.sequence.grows or end.known.shape[1] != prints.filled:
                continue
            origins = _origins(prints.keys[:, : prints.filled], end.known)
            if origins is not None:
                told = self._told_since(end, when)
                is_alike = end.queries.shape == prints.queries.shape
                # A token that is written twice may ask the same again: then self-attention tells of the step between.
                is_again = is_alike and bool(same_rows(prints.queries, end.queries).diagonal().all())
                if is_again and (told is None or told.origins is None):
                    why = "it asks the same queries of the same keys as an earlier call"
                elif prints.memory.is_that_of(end.memory) if told is None else told.origins is not None:
                    origins = _narrowed(origins, None if told is None else told.origins)
                    return _Found(end, 0, prints.filled, origins), ""
                else:
                    why = "its keys are equal to those of an earlier call, but were made anew"
        if why:
            return None, why
        if kept < 1:
            return None, "all its keys are new: another input, or a run without a cache"
        why = (
            "its keys neither are those of an earlier call nor begin with them: another input, or a cache that "
            "changes keys"
        )
        return self._cut_back(prints, ends, kept), why

    def _told_since(self, end: _End, when: Moment) -> _LastResult | None:
        since = max(when.begun or 0, end.last.when.at if end.last.when.thread == when.thread else 0)
        told = self._told.get(when.thread)
        return told if told is not None and told.at > since else None

    @staticmethod
    def _cut_back(prints: Prints, ends: list[_End], kept: int) -> _Found | None:
        for end in sorted(ends, key=lambda end: -end.order):
            start = end.last.start
            if end.sequence.grows is not False and start + kept < end.known.shape[1]:
                origins = _origins(prints.keys[:, :kept], end.known[:, start : start + kept])
                later = [step for step in end.sequence.steps if step.first >= start + kept]
                # No step between may have changed the order of the batch.
                if origins is not None and all(step.origins is None for step in later):
                    return _Found(end, start, kept, origins, start + kept)
        return None

    def _begin(self, name: str, call: int, prints: Prints | None, when: Moment, why: str) -> None:
        sequences = self._of.setdefault(name, [])
        if sequences:
            # The first run of a module does not show whether the model begins anew.
            self._told[when.thread] = _LastResult(when.at, None)
        if prints is None:
            sequences.append(CallSequence([SequenceStep(call, when, 0, 0)], why))
            return
        first = prints.filled - prints.queries.shape[1]
        step = SequenceStep(call, when, 0, first, alike=_unless_own(_alike(prints, 0)), filled=prints.filled)
        sequences.append(CallSequence([step], why))
        self._open(name, sequences[-1], prints.keys[:, : prints.filled], prints)

    def _go_on(self, name: str, call: int, prints: Prints, when: Moment, found: _Found) -> int | None:
        end, origins, new = found.end, found.origins, prints.keys[:, found.kept : prints.filled]
        sequence, before = end.sequence, end.last
        known = prints.keys[:, : prints.filled]
        if new.shape[1] and found.start:
            known = torch.cat([end.known[:, : found.cut][rows_before(origins)], new], 1)
        moved = _unless_own(origins)
        alike = None if moved is None or _is_one_to_one(moved) else _unless_own(_alike(prints, found.kept))
        step = SequenceStep(call, when, found.start, found.start + found.kept, moved, alike, prints.filled)
        if new.shape[1]:
            self._told[when.thread] = _LastResult(when.at, origins)
        if found.cut is not None and found.cut <= before.first:
            why = f"its cache was cut back to {found.cut} keys, to where it was before other calls"
            kept = [step for step in sequence.steps if step.first < found.cut]
            sequence = CallSequence([*kept, step], why, True)
            self._of[name].append(sequence)
            self._open(name, sequence, known, prints)
            return None
        sequence.steps.append(step)
        sequence.grows = bool(new.shape[1])
        self._ends[name].remove(end)
        self._open(name, sequence, known, prints)
        return before.call

    def _open(self, name: str, sequence: CallSequence, known: Tensor, prints: Prints) -> None:
        self._count += 1
        ends = self._ends[name]
        ends.append(_End(sequence, known, prints.queries, prints.memory, self._count))
        del ends[:-OPEN]


def rows_before(origins: Tensor) -> Tensor:
    """One parent row for each row (B,) of the possible ones (B, C): its own position, or else the first."""
    places = torch.arange(len(origins), device=origins.device)
    inside = places.clamp_max(origins.shape[1] - 1)
    stays = origins[places, inside] & (places == inside)
    return torch.where(stays, places, origins.int().argmax(1))


def _origins(kept: Tensor, known: Tensor) -> Tensor | None:
    """The possible rows of a batch of known keys for each row of saved keys, bool (B, C); None if a row has none."""
    found = same_rows(kept, known)
    return found if bool(found.any(1).all()) else None


def _narrowed(origins: Tensor, others: Tensor | None) -> Tensor:
    if others is None or others.shape != origins.shape:
        return origins
    both = origins & others
    return both if bool(both.any(1).all()) else origins


def _alike(prints: Prints, first: int) -> Tensor:
    """Rows of a batch with equal queries, and equal keys from the first new one on: bool (B, B)."""
    if len(prints.keys) == 1:
        return torch.ones(1, 1, dtype=torch.bool, device=prints.keys.device)
    new = prints.keys[:, first : prints.filled]
    alike = same_rows(prints.queries, prints.queries)
    return alike & same_rows(new, new) if new.shape[1] else alike


def _is_one_to_one(origins: Tensor) -> bool:
    return origins.shape[0] == origins.shape[1] and bool((origins.sum(0) == 1).all() & (origins.sum(1) == 1).all())


def _unless_own(pairs: Tensor) -> Tensor | None:
    rows, columns = pairs.shape
    is_own = rows == columns and torch.equal(pairs, torch.eye(rows, dtype=torch.bool, device=pairs.device))
    return None if is_own else pairs
