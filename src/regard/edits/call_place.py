"""The sizes of a call, and the positions of its queries and keys in the whole sequence."""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard.call.shapes import Sizes
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

    Raises:
        ArgumentError: it is no index, slice, range, tensor or collection of indices, or it chooses none.

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
