"""Ways to run a subject, and differences between two of them, told apart from rounding, and located in the modules.

A difference that vanishes in double precision is rounding (even a mixture of experts may choose another expert by it);
a persistent one is a fault. So a large difference is measured again in float64, where a choice takes the first of ties.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.watching.checks.runs import Sample, Side, SubjectRun, UnsupportedError
from regard.watching.checks.subject import Subject
from regard.watching.interference import (
    ROWS,
    Comparison,
    Departed,
    Place,
    Places,
    PositionAxes,
    RunTrace,
    proved_axes,
    results_of,
    tensors_of,
)

SEED = 0

LARGE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""From where on a difference is measured again, relative to the largest output; 1e-2 in other dtypes."""
STAYS = 1e-6
"""The least fault in float64; many models still compute parts in float32 there."""
LEAK = 1e-7
"""A relative difference above this is a leak: two runs of the same shapes are equal to the bit."""
EVERY = slice(None)


class Way(NamedTuple):
    run: Callable[[Subject], SubjectRun]
    rows: int = 1
    begin: Callable[[Subject], Subject] = Subject.fresh
    """The subject that runs, as it is before: nothing of this is compared."""

    def __call__(self, subject: Subject) -> SubjectRun:
        own = self.begin(subject)
        torch.manual_seed(SEED)
        return self.run(own)


class Around(NamedTuple):
    """A state of a subject, such as its attention written out."""

    state: Callable[[Subject], AbstractContextManager[object]] = nullcontext
    begin: Callable[[Subject], Subject] = Subject.fresh


plain, written_out = Around(), Around(Subject.eager)


def as_they_are(
    rows: Sequence[Sample], *, side: Side = "right", filler: int = 0, width: int = 0, around: Around = plain
) -> Way:
    def run(subject: Subject) -> SubjectRun:
        with around.state(subject):
            return subject.run(rows, side=side, filler=filler, width=width)

    return Way(run, len(rows), around.begin)


@contextmanager
def _trained(subject: Subject) -> Iterator[None]:
    """The model in training mode, whose code path may differ. Nothing is dropped: of a mixture of experts, each gets as
    many random numbers as it has tokens, and other last tokens go to other experts."""
    subject.model.train()
    for one in subject.model.modules():
        if isinstance(one, DROPOUTS):
            one.eval()
    try:
        yield
    finally:
        subject.model.eval()


in_training = Around(_trained, Subject.copied)  # Training moves statistics, which are to stay as they are.
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def are_equal(one: SubjectRun, other: SubjectRun) -> bool:
    mine, theirs = ({n: x.nan_to_num() for n, x in results_of(run.output).items()} for run in (one, other))
    return mine.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in mine.items())


class OneDraw(TorchFunctionMode):
    """`torch.rand` draws one number alone. What 0 and nearly 1 leave unchanged is decided by no draw."""

    has_others = False
    """True if a function drew in another way."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, found = random_states(), func(*args, **(kwargs or {}))
        if func in (torch.rand, torch.rand_like):
            return found.fill_(self.number)
        self.has_others = self.has_others or not all(map(torch.equal, before, random_states()))
        return found


def random_states() -> list[Tensor]:
    """Those of torch's generators, which a draw moves on."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def loss_of(subject: Subject, row: Sample) -> float:
    torch.manual_seed(SEED)
    output = subject.called(subject.together([row], "right")[0])
    found = [one for _, one in tensors_of(output) if one.is_floating_point() and one.numel() == 1]
    if not found:
        raise UnsupportedError("it gives no loss")
    return float(found[0])


class Same(NamedTuple):
    row: int = 0
    other: int = 0
    at: slice = EVERY
    """The positions in both."""
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


class FirstOfTies(TorchFunctionMode):
    """Let `topk` take the first of equal scores, such as zeros of relu. Its own choice depends on the width."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        return self._first(*args, **(kwargs or {}))

    def _first(self, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        values, indices = input.sort(dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


class Broken(NamedTuple):
    """A promise that does not hold: by how much, and the first module that departs."""

    numbers: Mapping[str, float]
    departed: Departed | None


class Judge:
    """Decides between rounding and fault; makes at most one copy of the model, in float64, and locates faults."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.has_nan = subject, False
        self._axes: dict[tuple[bool, bool], PositionAxes] = {}

    def difference(self, promise: Promise) -> float | None:
        """The largest difference of the results at the positions of a promise, over the largest result; inf if one of
        them has NaN, None without a result to compare."""
        compared = self._compared(promise, is_double=False, parts=False)
        found, self.has_nan = compared.of_results(), compared.has_nan or self.has_nan
        return found

    def broken(self, promise: Promise, least: float | None = None) -> Broken | None:
        """The measured difference, if it stays in float64, and the module where it begins; or None. NaN is always
        beyond rounding. A model without a result at the positions is judged by its modules alone, in both dtypes."""
        dtype = next((p.dtype for p in self.subject.model.parameters()), torch.float32)
        found = self.difference(promise)
        least = LARGE.get(dtype, 1e-2) if least is None else least
        if found is not None and found <= (LEAK if promise.is_exact else least):
            return None
        departed, again = None, found
        for is_double in (True, False):
            try:
                compared = self._compared(promise, is_double=is_double, parts=True)
            except Exception:  # of a model without float64, or one that does not run under traces
                continue
            departed, again = compared.first_departure(), compared.of_results() if is_double else found
            if is_double and compared.has_nan and not self.has_nan:
                continue  # The least number of float64, added to itself in a mask, is infinite.
            if found is not None or departed is None:
                break
        if found is None:
            return None if departed is None else Broken({"difference": departed.difference}, departed)
        numbers = {"difference": found}
        if is_double:
            numbers["in float64"] = torch.nan if again is None else again
        # A model without float64 gives no second opinion: of unlike shapes only a large difference counts then.
        least = STAYS if is_double else least if promise.is_exact else 1e-2
        is_rounding = again is not None and again <= least and math.isfinite(found)
        return None if is_rounding else Broken(numbers, departed)

    @cached_property
    def double(self) -> Subject:
        return self.subject.in_double()

    def _compared(self, promise: Promise, *, is_double: bool, parts: bool) -> Comparison:
        subject, axes = self.double if is_double else self.subject, self.axes(is_double, parts)
        one, first = _traced(promise.one, subject, axes, parts=parts)
        other, second = _traced(promise.other, subject, axes, parts=parts)
        pairs = [(_some(first.places[pair.row], pair), _some(second.places[pair.other], pair))
                 for pair in promise.same]  # fmt: skip
        tolerance = 1e-12 if promise.is_exact else STAYS if is_double else 1e-3
        return Comparison(one, other, pairs, tolerance, promise.least_features)

    def axes(self, is_double: bool, parts: bool) -> PositionAxes:
        if (is_double, parts) not in self._axes:
            subject = self.double if is_double else self.subject
            row, runs = subject.rows.long, dict[str, tuple[RunTrace, RunTrace, int]]()
            whole, run = _traced(as_they_are([row]), subject, parts=parts)
            with suppress(Exception):  # of a model of one row
                runs[ROWS] = _traced(as_they_are([row, subject.rows.other]), subject, parts=parts)[0], whole, 2
            for sequence in subject.sequences:
                length = len(run.places[0][sequence].at)
                with suppress(Exception):  # of a model of one length, which has no such axis
                    less = subject.cut(row, slice(length - 1), sequence)
                    runs[sequence] = whole, _traced(as_they_are([less]), subject, parts=parts)[0], length
            self._axes[is_double, parts] = proved_axes(runs)
        return self._axes[is_double, parts]


def _traced(
    way: Way, subject: Subject, axes: PositionAxes | None = None, *, parts: bool
) -> tuple[RunTrace, SubjectRun]:
    other = way.begin(subject)
    torch.manual_seed(SEED)
    trace = RunTrace(way.rows, axes)
    modules = dict(other.model.named_modules()) if parts else {"": other.model}
    with FirstOfTies() if parts else nullcontext(), trace.through(modules):
        run = way.run(other)
    trace.end(run.output)
    return trace, run


def _some(places: Places, same: Same) -> Places:
    return {name: Place(row, index[same.at]) for name, (row, index) in places.items() if same.of in (None, name)}
