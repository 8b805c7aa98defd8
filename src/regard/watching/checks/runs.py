"""The rows that a check hands to a model, and the output of a run with the places of each row."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regard.watching.interference import Places

Sample = Mapping[str, Tensor]
"""The inputs of one sequence by name, without a dimension for the batch and without padding."""
Side = Literal["right", "left"]


class Samples(NamedTuple):
    """Two sequences of the same length, and a shorter one, if the model can read one."""

    long: Sample
    other: Sample
    short: Sample | None


class UnsupportedError(Exception):
    """A trial that a subject has no means for."""


class SubjectRun(NamedTuple):
    output: Any
    places: list[Places]
    """The positions of each row."""


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
