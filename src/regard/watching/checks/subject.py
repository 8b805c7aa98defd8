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

from regard.watching.cache_argument import CACHE_NAMES, cache_in

Sample = Mapping[str, Tensor]
"""The inputs of one sequence by name."""
Side = Literal["right", "left"]


class Samples(NamedTuple):
    """The generated sequences: two of the same length, and a shorter one, if the model can read one."""

    long: Sample
    other: Sample
    short: Sample | None


class Output(NamedTuple):
    """One output of one row."""

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


class Subject(ABC):
    """A model under check, and how to call it."""

    model: nn.Module
    rows: Samples
    ahead: str | None
    """The input in which a causal model must not look ahead, or None."""
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

    @abstractmethod
    def run(self, rows: Sequence[Sample], *, side: Side = "right", filler: int = 0) -> list[Outputs]:
        """The outputs of each row of a batch; shorter rows are padded on a side, with values by `filler`."""

    def keep(self, rows: Sequence[Sample]) -> Tensor | None:
        """The real positions of such a batch, bool (B, S), where no argument of the model tells them; None without
        padding."""
        return None

    def steps(self, row: Sample, chunk: int) -> Outputs:
        """The outputs of a row read with a cache: half of it first, then `chunk` positions at a time."""
        raise UnsupportedError("it has no cache that is known")

    def shifted(self, row: Sample, by: int) -> Outputs:
        """The outputs of a row whose positions are all moved."""
        raise UnsupportedError("it takes no positions")

    def eager(self) -> AbstractContextManager[object]:
        """A context with attention written out, or with another kernel."""
        raise UnsupportedError("its attention has no other form")

    def changed(self, row: Sample, place: int) -> Sample:
        """The row with other values in the input `ahead`, from a place on."""
        assert self.ahead is not None
        own, donor = row[self.ahead], self.rows.other[self.ahead]
        tail = donor[place:] if not torch.equal(donor[place:], own[place:]) else own.flip(0)[: len(own) - place]
        return {**row, self.ahead: torch.cat([own[:place], tail])}

    def in_double(self) -> Self:
        """The same with a copy of the model in float64."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model).double()
        return other


@dataclass(frozen=True, slots=True)
class Padded:
    """A batch of sequences of several lengths."""

    values: Tensor
    keep: Tensor
    """The real positions, bool (B, L)."""

    @property
    def is_padded(self) -> bool:
        """True with any padding."""
        return not bool(self.keep.all())


def padded(sequences: Sequence[Tensor], side: Side, value: float | int) -> Padded:
    """Make a batch of sequences (L, ...) by padding them with a value.

    >>> padded([torch.tensor([1, 2]), torch.tensor([3])], "left", 0).values
    tensor([[1, 2],
            [0, 3]])
    """
    width = max(len(one) for one in sequences)
    values = sequences[0].new_full((len(sequences), width, *sequences[0].shape[1:]), value)
    keep = torch.zeros(values.shape[:2], dtype=torch.bool, device=values.device)
    for number, one in enumerate(sequences):
        place = slice(width - len(one), None) if side == "left" else slice(len(one))
        values[number, place], keep[number, place] = one, True
    return Padded(values, keep)


def tensors_of(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors of a model's output, by name."""
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


def by_row(found: Mapping[str, Tensor], keeps: Mapping[str, Tensor]) -> list[Outputs]:
    """The outputs of each row, without padding. `keeps` has the real positions of each input with some, bool (B, L).

    An output belongs to the input of the width of its second dimension. Outputs that mix sequences by design are left
    out, and in padded batches those without positions: a model may take them from the first or the last one.
    """
    batch = len(next(iter(keeps.values())))
    is_padded = any(not bool(keep.all()) for keep in keeps.values())
    rows: list[Outputs] = [{} for _ in range(batch)]
    for name, tensor in found.items():
        if not tensor.dim() or len(tensor) != batch or not set(ACROSS).isdisjoint(name.split(".")):
            continue
        of = next((n for n, keep in keeps.items() if tensor.dim() > 1 and tensor.shape[1] == keep.shape[1]), None)
        for number, row in enumerate(rows):
            row[name] = Output(tensor[number] if of is None else tensor[number][keeps[of][number]], of)
    if is_padded:
        rows = [{name: one for name, one in row.items() if one.of is not None} for row in rows]
    return rows


CacheStep = Callable[[int, int, Any], Any]
"""Runs a model on the positions from a start to a stop, with the cache of those before, or None; gives its output."""


def read_in_steps(length: int, chunk: int, step: CacheStep) -> dict[str, Tensor]:
    """The outputs of a sequence read with a cache: half of it first, then `chunk` positions at a time."""
    start, stop, past, parts = 0, length // 2, None, []
    while start < length:
        output = step(start, stop, past)
        past = cache_in(output) if isinstance(output, Mapping) else None
        if past is None:
            raise UnsupportedError("its output has no cache")
        parts.append({name: tensor for name, tensor in tensors_of(output) if name.split(".")[0] not in NO_STEPS})
        start, stop = stop, min(length, stop + chunk)
    return {
        name: torch.cat([part[name] for part in parts], 1)
        for name in parts[0]
        if all(name in part and part[name].dim() > 1 for part in parts)
    }
