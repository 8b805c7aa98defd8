"""The subject of a check: rows the model can read, alone and together, padded and step by step.

A row is one sequence, without a dimension for the batch. `run` makes a batch of rows, calls the model, and gives each
row its own outputs back, without padding.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from regard.watching.interference import Place, Places
from regard.watching.kept.arguments import CACHE_NAMES, cache_in

Sample = Mapping[str, Tensor]
"""The inputs of one sequence by name."""
Side = Literal["right", "left"]


class Samples(NamedTuple):
    """The generated sequences: two of the same length, and a shorter one, if the model can read one."""

    long: Sample
    other: Sample
    short: Sample | None


class Output(NamedTuple):
    values: Tensor
    of: str | None
    """The input whose positions are its first dimension; None without positions."""


Outputs = dict[str, Output]
ACROSS = ("loss", "logits_per_image", "logits_per_text", "aux_loss", *CACHE_NAMES, "attentions", "hidden_states")
"""Outputs of transformers' models that mix the sequences of a batch by design, or repeat other outputs."""
NO_STEPS = (*ACROSS, "encoder_last_hidden_state")
"""Those that are not of the positions of a step."""


class UnsupportedError(Exception):
    """A trial that a subject has no means for."""


class SubjectRun(NamedTuple):
    outputs: list[Outputs]
    places: list[Places]


class PackedRow(NamedTuple):
    row: Sample
    spans: list[slice]
    """The positions of each document."""
    source: str
    """The argument that tells them."""
    is_given: bool
    """True if the caller packs; False for a row made up here."""
    has_own_positions: bool
    """True if the argument says that the positions of each document begin anew."""


class Subject(ABC):
    model: nn.Module
    rows: Samples
    ahead: str | None
    """The sequence in which a causal model must not look ahead, by the name of an input, or None."""
    causal: bool | None
    """The expected causality; None if unknown."""
    told_causal: bool | None = None
    """The same, where the config of no module tells it."""
    sides: tuple[Side, ...] = ()
    """Where it can pad."""
    is_rotary: bool = False
    """True if a config says rotary positions: one shift of all of them changes no result."""
    counts_columns: bool = False
    """True if padding on the left may move real tokens to other positions, and the model takes no positions."""
    keeps_state: bool = False
    """True if a call changes the results of the next one: each run is that of a copy."""

    @abstractmethod
    def run(self, rows: Sequence[Sample], *, side: Side = "right", filler: int = 0, width: int = 0) -> SubjectRun:
        """Run a batch; rows that are shorter than the longest, or than `width`, are padded on a side, with values by
        `filler`."""

    def alone(self, row: Sample) -> Sample:
        return row

    def keep(self, rows: Sequence[Sample]) -> Tensor | None:
        """The real positions of such a batch, bool (B, S), where no argument of the model tells them; None without
        padding."""
        return None

    def inputs_of(self, sequence: str) -> tuple[str, ...]:
        return (sequence,)

    def fixed(self, sequence: str) -> tuple[str, ...]:
        """Those of them whose values are no contents: positions, kinds and documents."""
        return ()

    @property
    def sequences(self) -> tuple[str, ...]:
        return () if self.ahead is None else (self.ahead,)

    def made(self, length: int) -> Sample:
        """A row whose sequence `ahead` has another length."""
        raise UnsupportedError("its inputs have one length")

    def packed(self) -> PackedRow | None:
        return None

    def steps(
        self, rows: Sequence[Sample], last: int, chunk: int, *, side: Side = "right", turned: bool = False
    ) -> SubjectRun:
        """Read rows with a cache: all but the `last` positions at once, padded on a side, and these `chunk` at a time;
        `turned` exchanges two rows, and their caches, after the prompt."""
        raise UnsupportedError("it has no cache that is known")

    def shifted(self, row: Sample, by: int) -> SubjectRun:
        raise UnsupportedError("it takes no positions")

    def eager(self) -> AbstractContextManager[object]:
        raise UnsupportedError("its attention has no other form")

    def cut(self, row: Sample, at: slice, sequence: str | None = None) -> Sample:
        """Some positions of a sequence, `ahead` by default, in each of its inputs."""
        names = self.inputs_of(sequence or self.ahead or "")
        return {**row, **{name: row[name][at] for name in names if name in row}}

    def changed(self, row: Sample, at: slice) -> Sample:
        """The row with other contents at some positions of the sequence `ahead`, in each of its inputs."""
        assert self.ahead is not None
        names = [name for name in self.inputs_of(self.ahead) if name not in self.fixed(self.ahead)]
        return {**row, **{name: self._others(name, row[name], at) for name in names if name in row}}

    def contents(self) -> str:
        """The inputs that `changed` changes, for a sentence."""
        assert self.ahead is not None
        return " and ".join(name for name in self.inputs_of(self.ahead) if name not in self.fixed(self.ahead))

    def _others(self, name: str, values: Tensor, at: slice) -> Tensor:
        """Other values at some positions: of integers those that occur in the rows, without marks such as images'."""
        own, found = values[at], values.clone()
        if values.is_floating_point():
            noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(1)).to(own)
            usual = values[values.isfinite() & (values.abs() < HUGE)]
            found[at] = own + noise * (float(usual.std()) + 1 if len(usual) > 1 else 1)
        elif values.dtype != torch.bool:
            kept = torch.tensor(sorted(self.marks()), dtype=values.dtype, device=values.device)
            pool = torch.cat([one[name].flatten() for one in self.rows if one is not None and name in one]).unique()
            pool = pool[~torch.isin(pool, kept)]
            if len(pool) > 1:
                step = 1 + torch.arange(own.numel(), device=own.device).view(own.shape) % (len(pool) - 1)
                other = pool[(torch.searchsorted(pool, own) + step) % len(pool)]
                found[at] = torch.where(torch.isin(own, kept), own, other)
        return found

    def marks(self) -> set[int]:
        """The ids of tokens that stand for something else, such as a patch of an image."""
        return set()

    def fresh(self) -> Self:
        if not self.keeps_state:
            return self
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        return other

    def in_double(self) -> Self:
        """The same with a copy of the model in float64."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model).double()
        return other


HUGE = 1e4
"""From here on, a number in an input stands for a hidden pair."""


@dataclass(frozen=True, slots=True)
class Padded:
    values: Tensor
    keep: Tensor
    """The real positions, bool (B, L)."""

    @property
    def is_padded(self) -> bool:
        return not bool(self.keep.all())


def padded(sequences: Sequence[Tensor], side: Side, value: float | int, width: int = 0) -> Padded:
    """Make a batch of sequences (L, ...) by padding them with a value, to the longest of them or a width.

    >>> padded([torch.tensor([1, 2]), torch.tensor([3])], "left", 0).values
    tensor([[1, 2],
            [0, 3]])
    """
    width = max(width, *(len(one) for one in sequences))
    values = sequences[0].new_full((len(sequences), width, *sequences[0].shape[1:]), value)
    keep = torch.zeros(values.shape[:2], dtype=torch.bool, device=values.device)
    for number, one in enumerate(sequences):
        place = slice(width - len(one), None) if side == "left" else slice(len(one))
        values[number, place], keep[number, place] = one, True
    return Padded(values, keep)


def tensors_of(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name or "output", output
    elif isinstance(output, Mapping):
        for key, part in output.items():
            yield from tensors_of(part, f"{name}.{key}" if name else str(key))
    elif isinstance(output, list | tuple):
        for number, part in enumerate(output):
            yield from tensors_of(part, f"{name}.{number}" if name else str(number))


def output_of(model: Any, batch: Any) -> Any:
    """The output of a model for a mapping of arguments, a tuple of them or one tensor: on the device of its parameters,
    and numbers in their dtype."""
    own = next((p for p in model.parameters()), torch.empty(0))

    def fitted(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        return one.to(own.device, own.dtype if one.is_floating_point() else None)

    if isinstance(batch, Mapping):
        return model(**{name: fitted(one) for name, one in batch.items()})
    return model(*map(fitted, batch if isinstance(batch, list | tuple) else (batch,)))


def by_row(found: Mapping[str, Tensor], keeps: Mapping[str, Tensor]) -> SubjectRun:
    """The outputs of each row, without padding. `keeps` has the real positions of each sequence, bool (B, L), that of a
    decoder first.

    An output belongs to the sequence of the width of its second dimension. Outputs that mix sequences by design are
    left out, and in padded batches those without positions: a model may take them from the first or the last one.
    """
    batch = len(next(iter(keeps.values())))
    is_padded = any(not bool(keep.all()) for keep in keeps.values())
    rows: list[Outputs] = [{} for _ in range(batch)]
    for name, tensor in found.items():
        if not tensor.dim() or len(tensor) != batch or not set(ACROSS).isdisjoint(name.split(".")):
            continue
        order = [*keeps.items()][:: -1 if name.startswith("encoder_") else 1]
        of = next((n for n, keep in order if tensor.dim() > 1 and tensor.shape[1] == keep.shape[1]), None)
        for number, row in enumerate(rows):
            row[name] = Output(tensor[number] if of is None else tensor[number][keeps[of][number]], of)
    if is_padded:
        rows = [{name: one for name, one in row.items() if one.of is not None} for row in rows]
    at: list[Places] = [{n: Place(row, keep[row].nonzero()[:, 0]) for n, keep in keeps.items()} for row in range(batch)]
    return SubjectRun(rows, at)


CacheStep = Callable[[slice, Any], Any]
"""Runs a model on some positions, with the cache of those before, or None; gives its output."""


def read_in_steps(cuts: Sequence[slice], step: CacheStep, *, turned: bool = False) -> dict[str, Tensor]:
    """The outputs of sequences read with a cache, part by part; `turned` exchanges two rows after the first part."""
    past, parts = None, []
    for number, cut in enumerate(cuts):
        output = step(cut, past)
        past = cache_in(output) if isinstance(output, Mapping) else None
        if past is None:
            raise UnsupportedError("its output has no cache")
        found = {name: tensor for name, tensor in tensors_of(output) if name.split(".")[0] not in NO_STEPS}
        if turned and not number:
            found = {name: one.flip(0) for name, one in found.items()}
            if not hasattr(past, "reorder_cache"):
                raise UnsupportedError("its cache does not reorder its rows")
            past.reorder_cache(torch.tensor([1, 0], device=next(iter(found.values())).device))
        parts.append(found)
    return {
        name: torch.cat([part[name] for part in parts], 1)
        for name in parts[0]
        if all(name in part and part[name].dim() > 1 for part in parts)
    }


def in_parts(length: int, last: int, chunk: int) -> list[slice]:
    """All but the last positions, and these some at a time.

    >>> in_parts(7, 3, 2)
    [slice(0, 4, None), slice(4, 6, None), slice(6, 7, None)]
    """
    starts = range(length - last, length, chunk)
    return [slice(0, length - last), *(slice(start, min(length, start + chunk)) for start in starts)]
