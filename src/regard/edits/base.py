"""The interface of all edits and their common parts: the sizes of a call, and the places of its queries and keys."""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard.call.shapes import Sizes
from regard.edits.edited_weights import EditedWeights
from regard.errors import ArgumentError, ShapeError

Positions = int | slice | range | Iterable[int] | Tensor | None
"""Positions an edit chooses: an index, a slice, indices, a bool tensor, or None for all."""


AXES_SAID = {"query": "query", "key": "key", "head": "head", "batch": "row of the batch"}


class Chosen1D(NamedTuple):
    local: Tensor
    """Their indices in the call (n,)."""
    among: Tensor
    """The index of each among all the chosen positions (n,): the call may lack some."""
    total: int
    """How many positions were chosen in all."""


@dataclass(frozen=True, slots=True)
class CallPlace:
    name: str
    number: int
    """The number of the call among those of its module."""
    sizes: Sizes
    device: torch.device
    dtype: torch.dtype
    """The dtype of its scores."""
    first_query: int = 0
    """The position of its first query."""
    first_key: int = 0
    """The position of its first key: above 0 for a cache with dropped keys."""
    filled: int | None = None
    """How many keys there are before the empty places of a buffer; None for all."""
    heads_unknown: str = ""
    """Why batch rows and heads are not separable; empty if they are."""
    missing: list[str] = field(default_factory=list)
    """The axes of which the latest edit chose positions that the call has not."""

    @property
    def queries(self) -> range:
        return range(self.first_query, self.first_query + self.sizes.queries)

    @property
    def keys(self) -> range:
        return range(self.first_key, self.first_key + (self.sizes.keys if self.filled is None else self.filled))

    def __str__(self) -> str:
        call = f", call {self.number}" if self.number else ""
        return f"{self.name or 'the model itself'!r}{call}"

    def chosen(self, index: Positions, axis: str) -> Chosen1D | None:
        """The chosen positions along an axis ("query", "key", "head" or "batch") within the call; None for all. Raises
        ArgumentError beyond the last position or for repetition, ShapeError for tensors of other dtypes or sizes."""
        if index is None:
            return None
        if axis in ("head", "batch") and self.heads_unknown:
            raise ArgumentError(f"{self}: its heads and batch rows cannot be told apart: {self.heads_unknown}")
        here = {"query": self.queries, "key": self.keys, "head": range(self.sizes.heads),
                "batch": range(self.sizes.flat_batch)}[axis]  # fmt: skip
        wanted = self._numbers(index, axis, here.stop)
        if len(set(wanted)) < len(wanted):
            twice = next(n for n in wanted if wanted.count(n) > 1)
            raise ArgumentError(f"{self}: {AXES_SAID[axis]} {twice} is named twice")
        kept = [(n - here.start, place) for place, n in enumerate(wanted) if n >= here.start]
        local, among = zip(*kept, strict=True) if kept else ((), ())
        places, orders = (torch.tensor(part, dtype=torch.long, device=self.device) for part in (local, among))
        if not kept:
            self.missing.append(axis)
        return Chosen1D(places, orders, len(wanted))

    def _numbers(self, index: int | slice | Iterable[int] | Tensor, axis: str, end: int) -> list[int]:
        if isinstance(index, slice):
            return list(range(*index.indices(end)))
        if isinstance(index, Tensor) and index.dtype == torch.bool:
            if index.dim() != 1:
                raise ShapeError(f"{self}: a bool tensor of {axis}s has one dimension here, got {tuple(index.shape)}")
            index = index.nonzero()[:, 0]
        if isinstance(index, Tensor):
            if index.dim() > 1 or index.is_floating_point() or index.is_complex():
                raise ShapeError(
                    f"{self}: {axis}s are a 1-D tensor of integers or bools, got {tuple(index.shape)} of {index.dtype}"
                )
            index = [int(n) for n in index.reshape(-1).tolist()]
        numbers: list[int] = [index] if isinstance(index, int) else list(index)
        for n in numbers:
            if not -end <= n < end:
                hint = f"; a slice takes those that exist: slice({n}, {n + 1})" if axis in ("query", "key") else ""
                has = f"0 to {end - 1}{' so far' if hint else ''}"
                raise ArgumentError(f"{self}: there is no {AXES_SAID[axis]} {n}, but {has}{hint}")
        return [n + end if n < 0 else n for n in numbers]


def checked_positions(index: object, axis: str) -> Positions:
    """Check a choice of positions before any call is known; indices become a tuple.

    >>> checked_positions([3, 1], "keys"), checked_positions(slice(2), "keys")
    ((3, 1), slice(None, 2, None))
    """
    expected = f"{axis} takes a number, a slice, numbers, a tensor of integers or bools, or None for all"
    if index is None or isinstance(index, slice):
        return index
    if isinstance(index, Tensor):
        if index.is_floating_point() or index.is_complex():
            raise ArgumentError(f"{expected}; got a tensor of {index.dtype}")
        return index.detach().clone()
    try:
        if isinstance(index, Iterable):
            numbers = tuple(_integer(n) for n in index)
            if not numbers:
                raise ArgumentError(f"{axis} chooses nothing: {index!r}")
            return numbers
        return _integer(index)
    except TypeError as error:
        raise ArgumentError(f"{expected}; got {index!r}") from error


def _integer(number: object) -> int:
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError
    return operator.index(number)


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


def check_axes(edit: Edit) -> None:
    for axis in AXES:
        if hasattr(edit, axis):
            object.__setattr__(edit, axis, checked_positions(getattr(edit, axis), axis))


def where(edit: Edit) -> str:
    return ",".join(text for axis, word in AXES.items() if (text := said(word, getattr(edit, axis, None))))


def number_or_tensor(value: float | Tensor, what: str, *, least: float | None = None) -> None:
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
    if isinstance(value, Tensor):
        return not value.requires_grad and bool((value == number).all())
    return value == number


def indicator(chosen: Chosen1D | None, length: int, device: torch.device) -> Tensor | None:
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
