"""Differences between two runs, told apart from rounding, and located in the modules.

A difference that vanishes in double precision is rounding (even a mixture of experts may choose another expert by it);
a persistent one is a fault. So a large difference is measured again in float64, in every module.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

import torch

from regard.watching.checks.runs import SubjectRun
from regard.watching.checks.subject import Subject
from regard.watching.checks.ways import SEED, Way, as_they_are
from regard.watching.interference import (
    ROWS,
    Comparison,
    Departed,
    Place,
    Places,
    PositionAxes,
    RunTrace,
    proved_axes,
    traced,
)

LARGE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""From where on a difference is measured again, relative to the largest output; 1e-2 in other dtypes."""
STAYS = 1e-6
"""The least fault in float64; many models still compute parts in float32 there."""
LEAK = 1e-7
"""A relative difference above this is a leak: two runs of the same shapes are equal to the bit."""
EVERY = slice(None)


class Same(NamedTuple):
    row: int = 0
    other: int = 0
    at: slice = EVERY
    other_at: slice = EVERY
    of: str | None = None
    """The sequence of the positions; None for every sequence, and for outputs without positions."""


class Promise(NamedTuple):
    """Two ways to run a subject whose results must agree at some positions."""

    one: Way
    other: Way
    same: Sequence[Same] = (Same(),)
    is_exact: bool = False
    """True for two runs of the same shapes, which are equal to the bit."""
    least_features: int = 1
    """The numbers at each position of a result that is compared: more than 1 leaves losses out."""


class Broken(NamedTuple):
    """A promise that does not hold: by how much, and the first module that departs."""

    numbers: Mapping[str, float]
    departed: Departed | None


class Judge:
    """Decides between rounding and fault; makes at most one copy of the model, in float64, and locates faults."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._axes: dict[bool, PositionAxes] = {}

    def difference(self, promise: Promise) -> float | None:
        """The largest difference of the results at the positions of a promise, over the largest result; inf if either
        has NaN, None without a result to compare."""
        return self._compared(promise, is_double=False, parts=False).of_results()

    def broken(self, promise: Promise, least: float | None = None) -> Broken | None:
        """The measured difference, if it stays in float64, and the module where it begins; or None. NaN is always
        beyond rounding. A model without a result at the positions is judged by its modules alone."""
        dtype = next((p.dtype for p in self.subject.model.parameters()), torch.float32)
        found = self.difference(promise)
        least = LARGE.get(dtype, 1e-2) if least is None else least
        if found is not None and found <= (LEAK if promise.is_exact else least):
            return None
        departed, again = None, None
        for is_double in (True, False):
            with suppress(Exception):  # of a model without float64, or one that does not run under traces
                compared = self._compared(promise, is_double=is_double)
                departed, again = compared.first_departure(), compared.of_results() if is_double else found
                break
        if found is None:
            return None if departed is None else Broken({"difference": departed.difference}, departed)
        numbers = {"difference": found}
        if is_double:
            numbers["in float64"] = torch.nan if again is None else again
        # A model without float64 gives no second opinion: of unlike shapes only a large difference counts then.
        least = STAYS if is_double or promise.is_exact else 1e-2
        is_rounding = again is not None and again <= least and math.isfinite(found)
        return None if is_rounding else Broken(numbers, departed)

    @cached_property
    def double(self) -> Subject:
        """The subject in float64."""
        return self.subject.in_double()

    def _compared(self, promise: Promise, *, is_double: bool, parts: bool = True) -> Comparison:
        subject, axes = self.double if is_double else self.subject, self.axes(is_double)
        one, first = _traced(promise.one, subject, axes, parts=parts)
        other, second = _traced(promise.other, subject, axes, parts=parts)
        pairs = [(_some(first.places[pair.row], pair.at, pair.of),
                  _some(second.places[pair.other], pair.other_at, pair.of)) for pair in promise.same]  # fmt: skip
        tolerance = 1e-12 if promise.is_exact else STAYS if is_double else 1e-3
        return Comparison(one, other, pairs, tolerance, promise.least_features)

    def axes(self, is_double: bool) -> PositionAxes:
        if is_double not in self._axes:
            subject = self.double if is_double else self.subject
            row, runs = subject.rows.long, dict[str, tuple[RunTrace, RunTrace, int]]()
            whole, run = _traced(as_they_are([row]), subject)
            with suppress(Exception):  # of a model of one row
                runs[ROWS] = _traced(as_they_are([row, subject.rows.other]), subject)[0], whole, 2
            for sequence in subject.sequences:
                length = len(run.places[0][sequence].at)
                with suppress(Exception):  # of a model of one length, which has no such axis
                    less = subject.cut(row, slice(length - 1), sequence)
                    runs[sequence] = whole, _traced(as_they_are([less]), subject)[0], length
            self._axes[is_double] = proved_axes(runs)
        return self._axes[is_double]


def _traced(
    way: Way, subject: Subject, axes: PositionAxes | None = None, *, parts: bool = True
) -> tuple[RunTrace, SubjectRun]:
    other = subject.fresh()
    torch.manual_seed(SEED)
    trace, run = traced(other.model, lambda: way.run(other), way.rows, axes, parts=parts)
    trace.end(run.output)
    return trace, run


def _some(places: Places, at: slice, of: str | None) -> Places:
    return {name: Place(row, index[at]) for name, (row, index) in places.items() if of in (None, name)}
