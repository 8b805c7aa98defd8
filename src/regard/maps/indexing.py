"""What stands between the brackets of `map[...]`."""

from typing import Any

import torch
from torch import Tensor

from regard.errors import ShapeError


def expand_ellipsis(index: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """An index with one entry for each dimension.

    Raises:
        ShapeError: too many entries, or entries that a map does not take.
    """
    if any(i is None for i in index):
        raise ShapeError("a map takes integers, slices and index tensors, not None: index it, then add dimensions")
    dots = [n for n, i in enumerate(index) if i is Ellipsis]
    if len(dots) > 1 or len(index) - len(dots) > ndim:
        raise ShapeError(f"a map of {ndim} dimensions takes at most {ndim} indices and one ellipsis, got {index}")
    at = dots[0] if dots else len(index)
    fill = (slice(None),) * (ndim - len(index) + len(dots))
    return (*index[:at], *fill, *index[at + len(dots) :])


def positions(index: Any, length: int, name: str, device: torch.device) -> range | Tensor:
    """Rows or columns as a range or a 1-D tensor of positions from 0.

    Raises:
        ShapeError: an index out of range, or of another kind.
    """
    if isinstance(index, int):
        index = torch.tensor([index], device=device)
    elif isinstance(index, slice):
        where = range(*index.indices(length))
        return where if where.step == 1 else torch.tensor(list(where), dtype=torch.long, device=device)
    index = torch.as_tensor(index, device=device)
    if index.dtype == torch.bool and index.shape == (length,):
        index = index.nonzero().squeeze(-1)
    if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool:
        raise ShapeError(
            f"a {name} index must be an integer, a slice, or a 1-D tensor of integers or of {length} bools; "
            f"got {tuple(index.shape)} {index.dtype}"
        )
    if index.numel() and not (-length <= int(index.min()) and int(index.max()) < length):
        raise ShapeError(f"a {name} index must be in [-{length}, {length}), got {index.tolist()}")
    return index.long() % length
