"""The indices of a map, as in `map[...]`."""

import math
import operator
import reprlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.call.shapes import UNKNOWN, DimensionName, Dimensions
from regard.errors import ShapeError
from regard.tensors.guards import has_values

SEVERAL = "several index tensors moved its dimensions: choose by one at a time"


@dataclass(frozen=True)
class Index:
    whole: tuple[Any, ...]
    """All entries, without an ellipsis."""
    lead: tuple[Any, ...]
    pair: tuple[Any, ...]

    @classmethod
    def of(cls, index: Any, ndim: int) -> "Index":
        entries = tuple(_as_entry(i) for i in (index if isinstance(index, tuple) else (index,)))
        taken = sum(_dimensions(i) for i in entries)
        dots = [n for n, i in enumerate(entries) if i is Ellipsis]
        if len(dots) > 1 or taken > ndim:
            raise ShapeError(
                f"a map of {ndim} dimensions takes at most {ndim} indices and one ellipsis, got {reprlib.repr(index)}"
            )
        at = dots[0] if dots else len(entries)
        whole = (*entries[:at], *(slice(None),) * (ndim - taken), *entries[at + 1 :])
        # The entry of the queries is the first one after ndim - 2 dimensions that is no new dimension before them.
        seen, first = 0, 0
        while first < len(whole) and (seen < ndim - 2 or whole[first] is None):
            seen, first = seen + _dimensions(whole[first]), first + 1
        return cls(whole, whole[:first], whole[first:])

    @property
    def is_whole(self) -> bool:
        return self.pair == (slice(None), slice(None))

    @property
    def is_outer(self) -> bool:
        """Whether rows and columns are chosen separately: torch pairs index tensors with one another."""
        many = [i for i in (*self.lead, *self.pair) if isinstance(i, Tensor)]
        in_pair = [i for i in self.pair if isinstance(i, Tensor)]
        return (
            len(self.pair) == 2
            and all(i is not None and not (isinstance(i, Tensor) and i.dim() != 1) for i in self.pair)
            and (not in_pair or len(many) == 1)
        )

    @property
    def is_points(self) -> bool:
        """Whether 1-D tensors of one length index single weights: of the last two dimensions, or of all."""
        tensors = [i for i in (*self.lead, *self.pair) if isinstance(i, Tensor)]
        return (
            len(self.pair) == 2
            and all(isinstance(i, Tensor) for i in self.pair)
            and len(tensors) in (2, len(self.whole))
            and all(i.dim() == 1 and i.dtype not in (torch.bool, torch.uint8) for i in tensors)
            and len(set(map(len, tensors))) == 1
        )


def _as_entry(entry: Any) -> Any:
    if entry is None or entry is Ellipsis or isinstance(entry, slice | bool):
        return entry
    if is_integer(entry):
        return operator.index(entry)
    try:
        # An empty list would become a tensor of float32.
        empty = isinstance(entry, list) and not entry
        found = as_index(entry, torch.long if empty else None)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(
            f"a map takes integers, slices, None, ... and index tensors, got {reprlib.repr(entry)}"
        ) from error
    if found.is_floating_point() or found.is_complex():
        raise ShapeError(f"an index tensor has integers or bools, got {tuple(found.shape)} {found.dtype}")
    # torch takes tensors of uint8 as masks too.
    return found.bool() if found.dtype in (torch.uint8, torch.bool) else found.long()


def as_index(given: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor as it is, and anything else as one on the CPU: the default device may be one without data."""
    return torch.as_tensor(given, dtype=dtype, device=given.device if isinstance(given, Tensor) else "cpu")


def _dimensions(entry: Any) -> int:
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1


def is_integer(index: Any) -> bool:
    """Whether an index selects one row: an integer of Python, of NumPy, or a tensor of one integer without dimensions.

    >>> import numpy
    >>> is_integer(3), is_integer(numpy.int64(3)), is_integer(torch.tensor(3)), is_integer(True)
    (True, True, True, False)
    """
    if isinstance(index, bool | np.bool_) or (
        isinstance(index, Tensor | np.ndarray) and (index.ndim or index.dtype in (torch.bool, np.bool_))
    ):
        return False
    try:
        operator.index(index)
    except TypeError:
        return False
    return True


def chosen_flat_heads(shape: tuple[int, ...], lead: tuple[Any, ...], device: torch.device) -> Tensor:
    """The flat indices of the maps (T, S) that an index of the dimensions before them chooses."""
    leading = shape[:-2]
    try:
        return torch.arange(math.prod(leading), device=device).view(leading)[lead]
    except (IndexError, TypeError, RuntimeError, ValueError) as error:
        raise ShapeError(f"cannot index a map {tuple(shape)} by {reprlib.repr(lead)}: {error}") from error


def dimensions_after(lead: tuple[Any, ...], before: Dimensions, rank: int) -> Dimensions:
    """Those of the `rank` dimensions that an index of the leading ones leaves; a new one is a batch of one."""
    names = iter(before.leading)
    found: list[DimensionName] = ["batch" if i is None else next(names, "unknown") for i in lead]
    gone = [n for n, i in enumerate(lead) if is_integer(i)]
    tensors = [n for n, i in enumerate(lead) if n not in gone and i is not None and not isinstance(i, slice)]
    kept = [n for n in range(len(lead)) if n not in gone]
    if tensors and max(gone + tensors) - min(gone + tensors) > len(gone):
        # torch puts the dimension of a tensor first if a slice stands between it and an integer.
        kept.sort(key=lambda n: n not in tensors)
    taken = sum(i is not None for i in lead)
    if len(tensors) > 1 or taken != len(before.leading) or len(kept) != rank:
        return replace(before, leading=UNKNOWN * rank, why=SEVERAL)
    return before.named(tuple(found[n] for n in kept))


def positions(index: Any, length: int, name: str, device: torch.device) -> range | Tensor:
    """Rows or columns as a range or a 1-D tensor of positions from 0."""
    if isinstance(index, slice):
        where = range(*index.indices(length))
        return where if where.step == 1 else torch.tensor(list(where), dtype=torch.long, device=device)
    if is_integer(index):
        index = [operator.index(index)]
    given = index
    try:
        # An empty list would become a tensor of float32. A meta device has no data to check.
        index = as_index(index, torch.long if isinstance(given, list) and not given else None)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"a {name} index must be integers or bools, got {reprlib.repr(given)}") from error
    if index.dtype in (torch.bool, torch.uint8) and index.shape == (length,) and has_values(index):
        # torch takes tensors of uint8 as masks too.
        index = index.nonzero().squeeze(-1)
    if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool:
        raise ShapeError(
            f"a {name} index must be an integer, a slice, or a 1-D tensor of integers or of {length} bools; "
            f"got {tuple(index.shape)} {index.dtype}"
        )
    index = index.long()
    if index.numel() and has_values(index) and not (-length <= int(index.min()) and int(index.max()) < length):
        raise ShapeError(f"a {name} index must be in [-{length}, {length}), got {index.tolist()}")
    return index.to(device) % length
