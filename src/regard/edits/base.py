"""The interface of all edits, and their common parts."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from regard.edits.call_place import CallPlace, Chosen1D, Positions, checked_positions
from regard.edits.edited_weights import EditedWeights
from regard.errors import ArgumentError, ShapeError


class Edit(ABC):
    """A change of the weights of a call. Edits are frozen: one edit serves any number of calls."""

    @abstractmethod
    def apply(self, weights: EditedWeights, at: CallPlace) -> EditedWeights:
        """The weights this edit leaves; the same object if it changes nothing in this call.

        Raises:
            RegardError: the edit does not fit the call.
        """

    @property
    def needs_positions(self) -> bool:
        """True if the edit depends on the positions of a call's queries and keys."""
        return True


AXES = {"keys": "keys", "queries": "queries", "heads": "heads", "batch": "batch rows"}
"""The fields of edits that choose positions, each with its word."""


def check_axes(edit: Edit) -> None:
    for axis in AXES:
        if hasattr(edit, axis):
            object.__setattr__(edit, axis, checked_positions(getattr(edit, axis), axis))


def where(edit: Edit) -> str:
    """A few words about the choices of an edit, for the report; empty for all."""
    return ",".join(text for axis, word in AXES.items() if (text := said(word, getattr(edit, axis, None))))


def number_or_tensor(value: float | Tensor, what: str, *, least: float | None = None) -> None:
    """Check that every value is finite and at least `least`; raises ArgumentError otherwise."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise ArgumentError(f"{what} is a number or a tensor of floating point, got a tensor of {value.dtype}")
        numbers = value.detach()
        is_finite = bool(torch.isfinite(numbers).all())
        lowest = float(numbers.min()) if value.numel() and is_finite else 0.0
        shown = f"a tensor {tuple(value.shape)} with {'NaN or infinity' if not is_finite else f'{lowest:g}'} in it"
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(f"{what} is a number or a tensor of floating point, got {value!r}")
    else:
        is_finite, lowest, shown = math.isfinite(value), float(value), f"{value}"
    if not is_finite or (least is not None and lowest < least):
        bound = "" if least is None else f" and at least {least:g}"
        raise ArgumentError(f"{what} must be finite{bound}, got {shown}")


def is_all(value: float | Tensor, number: float) -> bool:
    """True if every value equals `number`, and none takes a gradient."""
    if isinstance(value, Tensor):
        return not value.requires_grad and bool((value == number).all())
    return value == number


def indicator(chosen: Chosen1D | None, length: int, device: torch.device) -> Tensor | None:
    """The chosen ones of `length` positions, bool; None for all."""
    if chosen is None:
        return None
    found = torch.zeros(length, dtype=torch.bool, device=device)
    found[chosen.local] = True
    return found


def rows_of(batch: Chosen1D | None, query: Chosen1D | None, at: CallPlace) -> Tensor:
    """The chosen rows of the batch and queries, bool (B or 1, 1, T or 1)."""
    rows = torch.ones(1, 1, 1, dtype=torch.bool, device=at.device)
    if (is_in := indicator(batch, at.sizes.flat_batch, at.device)) is not None:
        rows = is_in[:, None, None]
    return rows if (is_in := indicator(query, at.sizes.queries, at.device)) is None else rows & is_in


def of_keys(
    value: float | Tensor, at: CallPlace, keys: Positions, heads: Positions, batch: Positions, what: str
) -> Tensor | None:
    """Values at the chosen keys, heads and rows of the batch, 0 elsewhere: (B or 1, H or 1, 1, S); None if the call has
    no chosen position.

    There is one number, one for each chosen key (n,), or one for each chosen head and key (h, n). A bool tensor (B, S)
    chooses keys for each row of the batch, and takes one number. `what` names the value in messages.
    """
    sizes, device = at.sizes, at.device
    number = torch.as_tensor(value, dtype=at.dtype, device=device)
    head, rows = at.chosen(heads, "head"), at.chosen(batch, "batch")
    if isinstance(keys, Tensor) and keys.dtype == torch.bool and keys.dim() == 2:
        if number.dim():
            raise ShapeError(f"{at}: keys for each row of the batch take one {what}, got {tuple(number.shape)}")
        row = torch.where(_of_rows(keys, at)[:, None], number, 0.0)
        is_empty = False
    else:
        key = at.chosen(keys, "key")
        count = sizes.keys if key is None else key.total
        wide = sizes.heads if head is None else head.total
        if number.dim() > 2 or any(n not in (1, m) for n, m in zip(number.shape[::-1], (count, wide), strict=False)):
            raise ShapeError(
                f"{at}: the {what} is one number, one for each of the {count} chosen keys, or {(wide, count)}, one for "
                f"each chosen head and key; got {tuple(number.shape)}"
            )
        row = number.expand(len(number) if number.dim() == 2 else 1, count)[None]
        if key is not None:
            row = row.new_zeros(1, row.shape[1], sizes.keys).index_copy(-1, key.local, row[..., key.among])
        if head is not None and row.shape[1] > 1:
            row = row[:, head.among]
        is_empty = key is not None and not len(key.local)
    if is_empty or (rows is not None and not len(rows.local)) or (head is not None and not len(head.local)):
        return None
    if head is not None:
        row = row.expand(-1, len(head.local), -1)
        row = row.new_zeros(len(row), sizes.heads, sizes.keys).index_copy(1, head.local, row)
    if rows is not None:
        is_in = indicator(rows, sizes.flat_batch, device)
        assert is_in is not None
        row = torch.where(is_in[:, None, None], row, 0.0)
    return row[:, :, None]


def _of_rows(keys: Tensor, at: CallPlace) -> Tensor:
    """The chosen keys of the call for each row of the batch, bool (B or 1, S)."""
    batch, end = at.sizes.flat_batch, at.keys.stop
    if len(keys) not in (1, batch) or (keys.shape[1] > end and bool(keys[:, end:].any())):
        raise ShapeError(
            f"{at}: bool keys for each row of the batch are ({batch} or 1, at most {end} so far), got "
            f"{tuple(keys.shape)}"
        )
    # Keys newer than the tensor are not chosen.
    last = at.first_key + at.sizes.keys
    keys = torch.nn.functional.pad(keys.to(at.device), (0, max(0, last - keys.shape[1])))
    return keys[:, at.first_key : last]


SINGULAR = {"keys": "key", "queries": "query", "heads": "head", "batch rows": "batch row"}


def said(axis: str, index: Positions) -> str:
    """A few words about the chosen positions, for the report; empty for all.

    >>> said("heads", [1, 2]), said("keys", slice(3, 9)), said("keys", None)
    (' heads 1, 2', ' keys 3:9', '')
    """
    if index is None:
        return ""
    if isinstance(index, slice):
        ends = ("" if index.start is None else index.start, "" if index.stop is None else index.stop)
        return f" {axis} {ends[0]}:{ends[1]}{'' if index.step is None else f':{index.step}'}"
    if isinstance(index, Tensor):
        return f" {axis} of a tensor {tuple(index.shape)}"
    numbers = [index] if isinstance(index, int) else list(index)
    if len(numbers) == 1:
        return f" {SINGULAR[axis]} {numbers[0]}"
    shown = [str(n) for n in (numbers if len(numbers) < 6 else [*numbers[:4], "...", numbers[-1]])]
    return f" {axis} {', '.join(shown)}"
