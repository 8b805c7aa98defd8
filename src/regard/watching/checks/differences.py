"""Differences between the outputs of two runs, told apart from rounding, and located in the modules.

A difference that vanishes in double precision is rounding (even a mixture of experts may choose another expert by it);
a persistent one is a fault. So a large difference is measured again in float64, where a choice takes the first of ties.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.watching.checks.runs import Output, Outputs, SubjectRun
from regard.watching.checks.subject import Subject
from regard.watching.checks.ways import SEED, Way, as_they_are
from regard.watching.interference import (
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

    def difference(self, subject: Subject) -> float | None:
        """The largest difference of the outputs at these positions; None if there is no such output."""
        return apart(self.one(subject), self.other(subject), self.same)


def apart(one: SubjectRun, other: SubjectRun, same: Sequence[Same]) -> float | None:
    """The largest difference of the outputs of two runs, over the largest |output|; NaN if either has NaN; None
    without an output to compare."""
    found = []
    for pair in same:
        mine, theirs = (
            _at(one.outputs[pair.row], pair.at, pair.of),
            _at(other.outputs[pair.other], pair.other_at, pair.of),
        )
        if mine.keys() & theirs.keys():
            found.append(largest_difference([mine], [theirs]))
    return float(torch.tensor(found, dtype=torch.float64).max()) if found else None


def _at(outputs: Outputs, at: slice, of: str | None) -> Outputs:
    if of is None and at == EVERY:
        return outputs
    return {
        n: Output(one.values[at], one.of) for n, one in outputs.items() if one.of is not None and of in (None, one.of)
    }


def largest_difference(one: Sequence[Outputs], other: Sequence[Outputs]) -> float:
    """The largest difference of the outputs of rows in two runs, over the largest |output|; NaN if either has NaN.
    Outputs of unlike shapes are not compared."""
    worst = 0.0
    for mine, theirs in zip(one, other, strict=True):
        for name in mine.keys() & theirs.keys():
            a, b = (side[name].values.detach().cpu().double() for side in (mine, theirs))
            if a.shape != b.shape or not a.numel():
                continue
            if bool(a.isnan().any() or b.isnan().any()):
                return torch.nan
            # Where both are the same infinity, as logits a model rules out are, they do not differ.
            differ = (a - b).masked_fill(a == b, 0.0).abs().max()
            worst = max(worst, float(differ) / max(float(b[b.isfinite()].abs().max()), 1e-12))
    return worst


class FirstOfTies(TorchFunctionMode):
    """A top-k takes the first of equal scores: which ones it takes else, as of zeros of relu, depends on the width."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        return self._first(*args, **(kwargs or {}))

    def _first(self, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        chosen = input.sort(dim=dim, descending=largest, stable=True)
        return torch.return_types.topk(tuple(one.narrow(dim, 0, k) for one in chosen))


class Broken(NamedTuple):
    """A promise that does not hold: by how much, and the first module that departs."""

    numbers: Mapping[str, float]
    departed: Departed | None


class Judge:
    """Decides between rounding and fault; makes at most one copy of the model, in float64, and locates faults."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._double: Subject | None = None
        self._axes: dict[bool, PositionAxes] = {}

    def broken(self, promise: Promise, least: float | None = None, *, locates: bool = True) -> Broken | None:
        """The measured difference, if it stays in float64, and the module where it begins; or None. NaN is always
        beyond rounding. A model without an output at the positions is judged by its modules alone."""
        dtype = next((p.dtype for p in self.subject.model.parameters()), torch.float32)
        found = promise.difference(self.subject)
        if found is None:
            departed = self.located(promise, has_outputs=False) if locates else None
            return None if departed is None else Broken({"difference": departed.difference}, departed)
        least = LARGE.get(dtype, 1e-2) if least is None else least
        if found <= (LEAK if promise.is_exact else least):
            return None
        numbers = {"difference": found}
        if not (math.isnan(found) or dtype == torch.float64):
            try:
                with FirstOfTies():
                    again = promise.difference(self.double())
            except Exception:
                # A model without float64 gives no second opinion: of unlike shapes only a large difference counts then.
                if found <= (least if promise.is_exact else 1e-2):
                    return None
            else:
                if again is not None and again <= STAYS:
                    return None
                numbers["in float64"] = torch.nan if again is None else again
        return Broken(numbers, self.located(promise) if locates else None)

    def double(self) -> Subject:
        """The subject in float64."""
        if self._double is None:
            self._double = self.subject.in_double()
        return self._double

    def located(self, promise: Promise, *, has_outputs: bool = True) -> Departed | None:
        """The first module that departs, by both dtypes without outputs; None if none does, or no trace runs."""
        for is_double in (True, False):
            try:
                subject = self.double() if is_double else self.subject
                axes = self.axes(is_double)
                one, first = _traced(promise.one, subject, axes)
                other, second = _traced(promise.other, subject, axes)
            except Exception:
                continue
            pairs = [_places(pair, first, second) for pair in promise.same]
            tolerance = 1e-12 if promise.is_exact else STAYS if is_double else 1e-3
            found = Comparison(one, other, pairs, tolerance)
            departed = found.first_departure(of_rows=has_outputs)
            if has_outputs or departed is None or not is_double:
                return departed
        return None

    def axes(self, is_double: bool) -> PositionAxes:
        if is_double not in self._axes:
            subject = self.double() if is_double else self.subject
            row, lengths, shorter = subject.rows.long, dict[str, int](), dict[str, RunTrace]()
            whole, run = _traced(as_they_are([row]), subject)
            for sequence in subject.sequences:
                lengths[sequence] = len(run.places[0][sequence].at)
                less = subject.cut(row, slice(lengths[sequence] - 1), sequence)
                try:
                    shorter[sequence], _ = _traced(as_they_are([less]), subject)
                except Exception:
                    continue  # A model of one length has no such axis.
            self._axes[is_double] = proved_axes(whole, shorter, lengths)
        return self._axes[is_double]


def _traced(way: Way, subject: Subject, axes: PositionAxes | None = None) -> tuple[RunTrace, SubjectRun]:
    other = subject.fresh()
    torch.manual_seed(SEED)
    with FirstOfTies():
        return traced(other.model, lambda: way.run(other), way.rows, axes)


def _places(pair: Same, one: SubjectRun, other: SubjectRun) -> tuple[Places, Places]:
    return _some(one.places[pair.row], pair.at, pair.of), _some(other.places[pair.other], pair.other_at, pair.of)


def _some(places: Places, at: slice, of: str | None) -> Places:
    return {name: Place(row, index[at]) for name, (row, index) in places.items() if of in (None, name)}
