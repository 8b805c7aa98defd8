"""Additive masks of a kernel's blocks, rendered a few queries at a time into a reused buffer.

A predicate allocates several 8-byte indices for each pair, and an allocator may keep the memory of every freed block.
So a pass over blocks has one buffer for the mask, and renders few pairs at a time.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18
"""The pairs rendered together: 1 MiB in float32, and 2 MiB for each index tensor of a predicate."""


@dataclass(frozen=True, slots=True, eq=False)
class AdditiveMask:
    """The additive term of a block's scores."""

    tensor: Tensor | None
    """(B or 1, H or 1, t or 1, s), -inf for excluded pairs; None for zero."""
    live: Tensor | None
    """The rows with a key: bool (B or 1, H or 1, t or 1); None for all."""


NOTHING_ADDED = AdditiveMask(None, None)


class Buffer:
    """Memory for successive masks; each overwrites the last one."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def like(self, piece: Tensor, rows: int) -> Tensor:
        """An uninitialised tensor like `piece` (B or 1, H or 1, t, s), but with so many rows."""
        shape = (*piece.shape[:2], rows, piece.shape[-1])
        count = math.prod(shape)
        if self._memory is None or self._memory.numel() < count or self._memory.dtype != piece.dtype:
            self._memory = None  # Free the old memory before allocating the new.
            self._memory = piece.new_empty(count)
        return self._memory[:count].view(shape)


def by_chunks(
    chunks: Iterator[range], count: int, render: Callable[[range], Tensor | None], buffer: Buffer | None
) -> AdditiveMask:
    """The additive mask of `count` queries, from `render`, a function to the mask (..., t, s) of some of them.

    None from `render` stands for zeros.
    """
    whole: Tensor | None = None
    live = torch.ones(1, 1, count, dtype=torch.bool)
    for rows in chunks:
        piece = render(rows)
        if piece is None:
            if whole is not None:
                whole[:, :, rows.start : rows.stop] = 0.0
            continue
        if whole is None:
            whole = (buffer or Buffer()).like(piece, count)
            whole[:, :, : rows.start] = 0.0
            live = live.repeat(*piece.shape[:2], 1)
        whole[:, :, rows.start : rows.stop] = piece
        live[:, :, rows.start : rows.stop] = (piece > -torch.inf).any(-1)
    return AdditiveMask(whole, None if bool(live.all()) else live)
