"""Tensors with adjacent heads in one memory, as from one product of queries, keys and values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.tensors.guards import is_readable


def are_side_by_side(parts: Sequence[Tensor]) -> bool:
    """Whether parts (..., H_i, D) follow one another in one memory, position by position, without gaps.

    >>> whole = torch.zeros(2, 5, 6, 8)
    >>> are_side_by_side(whole.split([3, 1, 2], dim=-2)), are_side_by_side([whole[:, :, :3], whole[:, :, 4:]])
    (True, False)
    """
    first = parts[0]
    if not is_readable(*parts):
        return False
    if first.ndim < 3 or first.stride()[-2:] != (first.shape[-1], 1):
        return False
    together = sum(part.shape[-2] for part in parts) * first.shape[-1]
    if first.stride(-3) != together:
        return False
    memory, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        same_places = part.shape[:-2] == first.shape[:-2] and part.shape[-1] == first.shape[-1]
        if not same_places or part.dtype != first.dtype or part.stride() != first.stride():
            return False
        if part.untyped_storage().data_ptr() != memory or part.storage_offset() != offset:
            return False
        offset += part.shape[-2] * part.shape[-1]
    return True


def heads_together(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor (..., H, D) of adjacent parts, as a view; None for other parts.

    >>> whole = torch.arange(24.0).view(1, 2, 3, 4)
    >>> bool((heads_together(whole.split([1, 2], dim=-2)) == whole).all()), heads_together([whole, whole])
    (True, None)
    """
    if not are_side_by_side(parts):
        return None
    first, count = parts[0], sum(part.shape[-2] for part in parts)
    return first.as_strided((*first.shape[:-2], count, first.shape[-1]), first.stride(), first.storage_offset())


def memory_like(*heads: Tensor) -> list[Tensor]:
    """New memory for CPU tensors (B, H_i, T_i, D), with the heads of a position adjacent.

    Tensors adjacent in the input are adjacent in the new memory.

    >>> query, key, value = (part.transpose(1, 2) for part in torch.zeros(2, 5, 9, 8).split(3, dim=2))
    >>> heads_together([part.transpose(1, 2) for part in memory_like(query, key, value)]).shape
    torch.Size([2, 5, 9, 8])
    """
    found: list[Tensor] = []
    while len(found) < len(heads):
        rest = [part.transpose(1, 2) for part in heads[len(found) :]]
        run = next(count for count in range(len(rest), 0, -1) if count == 1 or are_side_by_side(rest[:count]))
        counts = [part.shape[-2] for part in rest[:run]]
        batch, length, _, width = rest[0].shape
        whole = torch.empty(batch, length, sum(counts), width, dtype=rest[0].dtype, device="cpu")
        found += [part.transpose(1, 2) for part in whole.split(counts, dim=2)]
    return found
