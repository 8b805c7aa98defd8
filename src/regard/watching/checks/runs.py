"""The rows that a check hands to a model, and the outputs of a run, row by row, without padding."""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regard.watching.interference import ROWS, Place, Places
from regard.watching.kept.arguments import CACHE_NAMES

Sample = Mapping[str, Tensor]
"""The inputs of one sequence by name, without a dimension for the batch and without padding."""
Side = Literal["right", "left"]


class Samples(NamedTuple):
    """Two sequences of the same length, and a shorter one, if the model can read one."""

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


def output_of(model: Any, batch: Any, **more: Any) -> Any:
    """The output of a model for a mapping of arguments, a tuple of them or one tensor: on the device of its parameters,
    and numbers in their dtype; and for `more` arguments."""
    own = next((p for p in model.parameters()), torch.empty(0))

    def fitted(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        return one.to(own.device, own.dtype if one.is_floating_point() else None)

    if isinstance(batch, Mapping):
        return model(**{name: fitted(one) for name, one in batch.items()}, **more)
    return model(*map(fitted, batch if isinstance(batch, list | tuple) else (batch,)), **more)


def by_row(
    found: Mapping[str, Tensor], keeps: Mapping[str, Tensor], *, has_pooled: bool = True,
    fixed: Container[tuple[str, str]] = (),
) -> SubjectRun:  # fmt: skip
    """The outputs of each row, without padding. `keeps` has the real positions of each sequence, bool (B, L), that of a
    decoder first.

    An output belongs to the sequence of the width of its second dimension, unless it is `fixed` there. Outputs that mix
    sequences by design are left out, and without `has_pooled` those without positions: a model may take them from the
    first one.
    """
    batch = len(next(iter(keeps.values())))
    rows: list[Outputs] = [{} for _ in range(batch)]
    for name, tensor in found.items():
        is_across = (name, ROWS) in fixed or not set(ACROSS).isdisjoint(name.split("."))
        if not tensor.dim() or len(tensor) != batch or is_across:
            continue
        order = [*keeps.items()][:: -1 if name.startswith("encoder_") else 1]
        own = [(n, keep) for n, keep in order if (name, n) not in fixed]
        of = next((n for n, keep in own if tensor.dim() > 1 and tensor.shape[1] == keep.shape[1]), None)
        for number, row in enumerate(rows) if has_pooled or of is not None else ():
            row[name] = Output(tensor[number] if of is None else tensor[number][keeps[of][number]], of)
    at: list[Places] = [
        {ROWS: Place(row, torch.zeros(1, dtype=torch.long)),
         **{n: Place(row, keep[row].nonzero()[:, 0]) for n, keep in keeps.items()}}
        for row in range(batch)
    ]  # fmt: skip
    return SubjectRun(rows, at)


def padded(sequences: Sequence[Tensor], side: Side, value: Tensor | float, width: int = 0) -> Tensor:
    """Make a batch of sequences (L, ...) by padding them with a value, to the longest of them or a width.

    >>> padded([torch.tensor([1, 2]), torch.tensor([3])], "left", 0)
    tensor([[1, 2],
            [0, 3]])
    """
    width = max(width, *(len(one) for one in sequences))
    found = sequences[0].new_zeros((len(sequences), width, *sequences[0].shape[1:]))
    found[:] = value
    for row, one in zip(found, sequences, strict=True):
        row[width - len(one) if side == "left" else 0 :][: len(one)] = one
    return found
