"""The indices that a map takes, as in `map[...]`."""

import operator
import reprlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import ShapeError


def expand_ellipsis(index: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """An index with one entry for each dimension.

    Raises:
        ShapeError: there are too many entries, or a map does not take one of them.
    """
    if any(i is None for i in index):
        raise ShapeError("a map takes integers, slices and index tensors, not None: index it, then add dimensions")
    dots = [n for n, i in enumerate(index) if i is Ellipsis]
    if len(dots) > 1 or len(index) - len(dots) > ndim:
        raise ShapeError(f"a map of {ndim} dimensions takes at most {ndim} indices and one ellipsis, got {index}")
    at = dots[0] if dots else len(index)
    fill = (slice(None),) * (ndim - len(index) + len(dots))
    return (*index[:at], *fill, *index[at + len(dots) :])


def is_integer(index: Any) -> bool:
    """Whether an index names one row: an integer of Python, of NumPy, or a tensor of one integer without dimensions.

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


def positions(index: Any, length: int, name: str, device: torch.device) -> range | Tensor:
    """Rows or columns as a range or a 1-D tensor of positions from 0.

    Raises:
        ShapeError: an index is out of range, or of another kind.
    """
    if isinstance(index, slice):
        where = range(*index.indices(length))
        return where if where.step == 1 else torch.tensor(list(where), dtype=torch.long, device=device)
    if is_integer(index):
        index = [operator.index(index)]
    given = index
    try:
        # An empty list would become a tensor of float32.
        index = torch.as_tensor(
            index, device=device, dtype=torch.long if isinstance(given, list) and not given else None
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"a {name} index must be integers or bools, got {reprlib.repr(given)}") from error
    if index.dtype in (torch.bool, torch.uint8) and index.shape == (length,):
        # torch takes tensors of uint8 as masks too.
        index = index.nonzero().squeeze(-1)
    if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool:
        raise ShapeError(
            f"a {name} index must be an integer, a slice, or a 1-D tensor of integers or of {length} bools; "
            f"got {tuple(index.shape)} {index.dtype}"
        )
    if index.numel() and not (-length <= int(index.min()) and int(index.max()) < length):
        raise ShapeError(f"a {name} index must be in [-{length}, {length}), got {index.tolist()}")
    return index.long() % length
