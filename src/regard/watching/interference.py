"""Interference: two runs of a model, compared module by module in call order, at the positions that must agree.

A run leaves a fingerprint of 8 bytes for each module, tensor and position: the sum of the values there, times fixed
random numbers, in float64; of the results of the model itself it leaves the values. Memory is linear in positions and
modules. The axis of the positions is the one whose size falls with the length of a sequence, and that of the rows the
one whose size falls with their number; sizes that happen to be equal prove nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.watching.kept.arguments import CACHE_NAMES

NumberedCall = tuple[str, int]
"""A module's path and the number of its call within a call of the model."""
TensorPlace = tuple[NumberedCall, bool, str]
"""A call, whether the tensor is of its outputs, and the tensor's name: that of an argument, and its number within."""
MODEL: NumberedCall = ("", 0)
PositionAxes = Mapping[TensorPlace, Sequence[tuple[int, str, int]]]
"""The axes of positions of a tensor, each with the name of its sequence and its number of streams, such as n-grams; and
that of rows, `ROWS`."""


ROWS = ""
STATES = (*CACHE_NAMES, "cache_params")
ACROSS = ("loss", "logits_per_image", "logits_per_text", "aux_loss", "attentions", "hidden_states", *STATES)
"""Outputs of transformers' models that mix the sequences of a batch by design, or repeat other outputs."""


def tensors_of(given: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(given, Tensor):
        yield name or "output", given
    elif isinstance(given, Mapping):
        for key, part in given.items():
            yield from tensors_of(part, f"{name}.{key}" if name else str(key))
    elif isinstance(given, list | tuple):
        for number, part in enumerate(given):
            yield from tensors_of(part, f"{name}.{number}" if name else str(number))


def results_of(output: Any) -> dict[str, Tensor]:
    """The results of a model by name: numbers that are of single sequences."""
    named = tensors_of(output)
    return {n: one for n, one in named if one.is_floating_point() and set(ACROSS).isdisjoint(n.split("."))}


class Place(NamedTuple):
    row: int
    at: Tensor
    """(n,), indices."""


Places = Mapping[str, Place]
"""The positions of each sequence by name."""


class FollowedRun:
    def __init__(self) -> None:
        self.running: list[NumberedCall] = []
        self._counts: Counter[str] = Counter()

    @contextmanager
    def through(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        handles = []
        for path, module in modules.items():
            handles += [
                module.register_forward_pre_hook(partial(self._begin, path), with_kwargs=True),
                module.register_forward_hook(self._end),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.running:
            self.begin_anew()
        self.running.append((path, self._counts[path]))
        self._counts[path] += 1
        return self.entered(self.running[-1], (args, kwargs))

    def _end(self, _: nn.Module, args: Any, output: Any) -> Any:
        return self.left(self.running.pop(), output)

    def begin_anew(self) -> None:
        self._counts.clear()

    def entered(self, call: NumberedCall, inputs: Any) -> Any:
        """The inputs in place of these, or None."""

    def left(self, call: NumberedCall, output: Any) -> Any:
        """The output in place of this one, or None."""


class AxisPrints(NamedTuple):
    sequence: str
    values: Tensor
    """(positions, rows), or (positions, 1) of a tensor for all rows, float64; (..., features) of results."""
    features: int
    """The number of values at a position."""


class Mark(NamedTuple):
    """The fingerprints of a tensor along its axes of positions, or of all of it where it has none."""

    shape: tuple[int, ...]
    along: tuple[AxisPrints, ...] = ()
    whole: float | None = None


TensorMarks = dict[str, Mark]
"""Those of the tensors of a call, by name."""


@dataclass(slots=True)
class TracedCall:
    at: NumberedCall
    inputs: "TensorMarks" = field(default_factory=dict)
    outputs: "TensorMarks" = field(default_factory=dict)
    parts: list["TracedCall"] = field(default_factory=list)


class RunTrace(FollowedRun):
    """The fingerprints of a run of a batch with some rows. Later calls of the model go on where the first ones end."""

    def __init__(self, rows: int, axes: PositionAxes | None = None) -> None:
        super().__init__()
        self.rows, self.axes = rows, axes
        self.calls: dict[NumberedCall, TracedCall] = {}
        self.roots: list[TracedCall] = []
        self._width = 0
        self._new: dict[str, int] = {}
        self._read: dict[tuple[str, str], int] = {}
        """The positions of a sequence that a module of no other one has read in this call, and in all calls."""

    def entered(self, call: NumberedCall, inputs: Any) -> None:
        around = None if len(self.running) < 2 else self.calls[self.running[-2]]
        if call not in self.calls:
            self.calls[call] = TracedCall(call)
            (self.roots if around is None else around.parts).append(self.calls[call])
        args, kwargs = inputs
        marks = self._marks(call, False, tensors_of({**dict(enumerate(args)), **kwargs}))
        if around is None:
            self._begin_part(call[0], marks)
        self.calls[call].inputs = self._continued(self.calls[call].inputs, marks)

    def left(self, call: NumberedCall, output: Any) -> None:
        one = self.calls[call]
        found = tensors_of(output) if call[0] else results_of(output).items()
        one.outputs = self._continued(one.outputs, self._marks(call, True, found))

    def end(self, output: Any) -> None:
        """Keep the results of a run that called parts of the model alone."""
        if MODEL not in self.calls:
            self.calls[MODEL] = TracedCall(MODEL, outputs=self._marks(MODEL, True, results_of(output).items()))

    def _begin_part(self, path: str, marks: TensorMarks) -> None:
        axes = [axis for mark in marks.values() for axis in mark.along]
        self._new = {axis.sequence: min(len(a.values) for a in axes if a.sequence == axis.sequence) for axis in axes}
        for sequence, new in self._new.items():
            self._read[path, sequence] = self._read.get((path, sequence), 0) + new

    def _continued(self, before: TensorMarks, now: TensorMarks) -> TensorMarks:
        """The marks of a call over all parts of a sequence that it has read."""
        if not before:
            return now
        joined = {name: self._joined(one, now[name]) for name, one in before.items() if name in now}
        return {name: one for name, one in joined.items() if one is not None}

    def _joined(self, one: Mark, other: Mark) -> Mark | None:
        pairs = list(zip(one.along, other.along, strict=False))
        are_alike = all(a.features == b.features and a.values.shape[1] == b.values.shape[1] for a, b in pairs)
        if len(one.along) != len(other.along) or not are_alike:
            return None
        along = [self._axis(*pair) for pair in pairs]
        found = tuple(axis for axis in along if axis is not None)
        return Mark(one.shape, found) if len(found) == len(along) else None

    def _axis(self, one: AxisPrints, other: AxisPrints) -> AxisPrints | None:
        """The positions of both, or those of the other one, as of a cache that holds the earlier ones too."""
        read = self._read.get((self.running[0][0] if self.running else "", one.sequence))
        if len(other.values) == self._new.get(one.sequence):
            return one._replace(values=torch.cat([one.values, other.values]))
        return other if len(other.values) in (read, len(one.values)) else None

    def _marks(self, call: NumberedCall, is_output: bool, named: Iterable[tuple[str, Tensor]]) -> TensorMarks:
        return {name: self._mark(x, (call, is_output, name)) for name, x in named if _is_plain(x)}

    @torch.no_grad()
    def _mark(self, x: Tensor, place: TensorPlace) -> Mark:
        if self.axes is None:
            return Mark(tuple(x.shape))
        axes = [axis for axis in self.axes.get(place, ()) if axis[0] < x.dim()]
        prints = torch.clone if place[1] and not place[0][0] else _product  # (The next call may write to results.)
        along = tuple(one for of in axes if of[1] != ROWS for one in self._along(x, *of, prints))
        whole = None if along or x.numel() > MOST_VALUES else float(_product(x.reshape(1, -1)).sum())
        if not along and (0, ROWS, 1) in axes and len(x) == self.rows and x.numel():
            rows = x.reshape(1, self.rows, -1)
            along = (AxisPrints(ROWS, prints(rows), rows.shape[-1]),)
        return Mark(tuple(x.shape), along, whole)

    def _along(
        self, x: Tensor, axis: int, sequence: str, streams: int, prints: Callable[[Tensor], Tensor]
    ) -> list[AxisPrints]:
        """Two readings of a first axis: it may hold each row's positions, or each position's rows; and of streams."""
        if streams > 1 and x.shape[1] % streams == 0:
            read = [x.unflatten(1, (streams, -1)).transpose(1, 2), x.unflatten(1, (-1, streams))]
            return [axis for one in read for axis in self._along(one, 1, sequence, 1, prints)]
        moved = x.movedim(axis, 0)
        rest = moved.shape[1:]
        if axis == 1 and rest[0] == self.rows:
            self._width = len(moved)
        if not axis and self.rows > 1 and len(moved) == self.rows * self._width:
            read = [x.unflatten(0, (self.rows, -1)).movedim(1, 0), x.unflatten(0, (-1, self.rows))]
            found = [one.reshape(*one.shape[:2], -1) for one in read]
        elif rest and self.rows > 1 and rest[0] % self.rows == 0 and not (axis == 0 and x.dim() == 2):
            found = [moved.unflatten(1, (self.rows, -1)).flatten(2)]
        else:
            found = [moved.reshape(len(moved), 1, -1)]
        along = [AxisPrints(sequence, prints(one), one.shape[-1]) for one in found if one.numel()]
        return along * 2 if not axis and len(along) == 1 else along


HIDDEN, MOST_VALUES = 1e30, 1 << 20
"""From where on a number in a mask stands for infinity; the most values of a tensor without positions that count."""


def _is_plain(x: Tensor) -> bool:
    return not x.is_nested and x.layout == torch.strided and not x.is_meta


def _product(x: Tensor) -> Tensor:
    """The fingerprints. The least number of a dtype counts as infinity, for which masks write it.

    >>> bool(_product(torch.full((40,), torch.finfo(torch.float64).min, dtype=torch.float64)).isfinite())
    True
    """
    if x.is_complex():
        x = torch.view_as_real(x).flatten(-2)
    x = x.detach().double()
    x = torch.where(x.abs() < HIDDEN, x, 2.3 * x.sign()).nan_to_num(nan=1.7)
    return x @ _numbers(x.shape[-1]).to(x.device)


@lru_cache(128)
def _numbers(size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))


def proved_axes(runs: Mapping[str, tuple[RunTrace, RunTrace, int]]) -> PositionAxes:
    """The axes of positions and rows, by two runs for each sequence and for `ROWS`: the size in the first one is given,
    and the second one has one position less, or one row. Two axes of rows hold pairs of them, as of texts and videos:
    they are no result of one."""
    found: dict[TensorPlace, list[tuple[int, str, int]]] = {}
    for sequence, (trace, shorter, size) in runs.items():
        shapes = dict(_shapes(shorter))
        for place, shape in _shapes(trace):
            less = shapes.get(place, ())
            pairs = zip(shape, less, strict=False) if len(less) == len(shape) else ()
            axes = [
                (axis, sequence, of) for axis, pair in enumerate(pairs)
                for of in range(1, 5 if axis == 1 and sequence != ROWS else 2) if pair == (of * size, of * (size - 1))
            ]  # fmt: skip
            if sequence != ROWS or axes == [(0, ROWS, 1)]:
                found.setdefault(place, []).extend(axes)
    return found


def _shapes(trace: RunTrace) -> Iterator[tuple[TensorPlace, tuple[int, ...]]]:
    for call in trace.calls.values():
        for is_output, marks in ((False, call.inputs), (True, call.outputs)):
            yield from (((call.at, is_output, name), mark.shape) for name, mark in marks.items())


class Departed(NamedTuple):
    path: str
    call: int
    position: int
    """The one that moved most, counted among those that must agree."""
    difference: float
    """By how much, as a share of the largest fingerprint."""


def shares(one: Tensor, other: Tensor, of: Tensor) -> Tensor:
    """The differences over the largest finite value of a tensor; inf for NaN in one, and 0 where both are NaN or the
    same infinity, as logits that a model rules out."""
    is_same = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).masked_fill(is_same, 0.0).abs().nan_to_num(torch.inf, torch.inf)
    return apart / max(float(of.double().nan_to_num(0.0, 0.0, 0.0).abs().max()), 1e-30)


def largest_difference(output: Any, expected: Any) -> float:
    """That of the first results of one shape, over the largest value; 0.0 without any."""
    for one, other in zip(results_of(output).values(), results_of(expected).values(), strict=False):
        if one.shape == other.shape and one.numel():
            return float(shares(one.double(), other.double(), other).max())
    return 0.0


class Comparison:
    """Two traces of the same model, and the positions of each that must agree, in pairs."""

    def __init__(
        self, one: RunTrace, other: RunTrace, pairs: Sequence[tuple[Places, Places]], tolerance: float,
        least_features: int = 1,
    ) -> None:  # fmt: skip
        self.one, self.other, self.pairs, self.tolerance = one, other, pairs, tolerance
        self.least_features, self.has_nan = least_features, False

    def of_results(self) -> float | None:
        """By how much the results of the model itself are apart, as a share of the largest; None without any."""
        mine, theirs = (trace.calls[MODEL] for trace in (self.one, self.other))
        found = self._apart(mine.outputs, theirs.outputs)
        return None if found is None else found[0]

    def first_departure(self) -> Departed | None:
        """The first call, in call order, whose inputs agree and whose output departs: a module in which no part
        departs does so by its own code. None if no output departs. Results without positions, as of pooling, are
        compared row by row."""
        return self._among(self.one.roots)

    def _among(self, calls: Sequence[TracedCall], around: TracedCall | None = None) -> Departed | None:
        moved: list[tuple[float, TracedCall]] = []
        for call in calls:
            twin = self.other.calls.get(call.at)
            if twin is None:
                continue
            given, gives = self._apart(call.inputs, twin.inputs), self._apart(call.outputs, twin.outputs)
            if around is not None and given is not None and given[0] > self.tolerance:
                if gives is not None and gives[0] <= self.tolerance:
                    continue
                return Departed(*around.at, given[1], given[0])
            fed = self._changed_wholes(call.inputs, twin.inputs)
            if gives is None:
                if (inner := self._among(call.parts, call)) is not None:
                    return inner
            elif gives[0] > self.tolerance:
                if fed and around is not None:
                    maker = next((of for whole, of in moved if whole in fed), around)
                    return Departed(*maker.at, gives[1], gives[0])
                return self._among(call.parts, call) or Departed(*call.at, gives[1], gives[0])
            moved += [(whole, call) for whole in self._changed_wholes(call.outputs, twin.outputs)]
        return None

    def _apart(self, ones: TensorMarks, others: TensorMarks) -> tuple[float, int] | None:
        """The largest difference of tensors with positions or rows, and its position; None without such tensors."""
        found = []
        for name in ones.keys() & others.keys():
            axes = [self._along(*pair) for pair in zip(ones[name].along, others[name].along, strict=False)]
            told = [axis for axis in axes if axis is not None]
            found += [min(told)] if told else []
        return max(found, default=None)

    def _along(self, one: AxisPrints, other: AxisPrints) -> tuple[float, int] | None:
        if not one.features == other.features >= self.least_features or one.sequence != other.sequence:
            return None
        found = []
        for mine, theirs in self.pairs:
            if one.sequence not in mine or one.sequence not in theirs:
                continue
            (row, at), (its_row, its_at) = mine[one.sequence], theirs[one.sequence]
            if not len(at) or int(at.max()) >= len(one.values) or int(its_at.max()) >= len(other.values):
                continue
            a = one.values[at.cpu().to(one.values.device), row % one.values.shape[1]]
            b = other.values[its_at.cpu().to(other.values.device), its_row % other.values.shape[1]]
            a, b = (values.double().cpu().reshape(len(at), -1) for values in (a, b))
            self.has_nan = self.has_nan or bool((a.isnan() & b.isnan()).any())
            apart = shares(a, b, one.values).amax(1)
            found.append((float(apart.max()), int(apart.argmax())))
        return max(found, default=None)

    @staticmethod
    def _changed_wholes(ones: TensorMarks, others: TensorMarks) -> set[float]:
        pairs = [(ones[name], others[name]) for name in ones.keys() & others.keys()]
        moved = [pair for pair in pairs if pair[0].shape == pair[1].shape and pair[0].whole != pair[1].whole]
        return {one.whole for one, other in moved if one.whole is not None and other.whole is not None}
