"""The additive masks of a kernel's blocks, rendered a few queries at a time into memory that is used again.

A predicate holds several numbers of 8 bytes for each pair that it is asked about, and an allocator may keep the memory
of every block that was freed. So a pass over blocks has one buffer for the mask, and asks for few pairs at a time.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18
"""How many pairs are rendered together: 1 MiB in float32, and 2 MiB for each index tensor of a predicate."""


@dataclass(frozen=True, slots=True, eq=False)
class AdditiveMask:
    """The numbers that are added to the scores of a block."""

    tensor: Tensor | None
    """(B or 1, H or 1, t or 1, s), -inf for excluded pairs; None if nothing is added or excluded."""
    live: Tensor | None
    """Which rows have a key: bool (B or 1, H or 1, t or 1); None if all have one."""


NOTHING_ADDED = AdditiveMask(None, None)


class Buffer:
    """Memory for one mask after another; the next mask overwrites the one before."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def like(self, piece: Tensor, rows: int) -> Tensor:
        """A tensor like `piece` (B or 1, H or 1, t, s), but with so many rows, whose numbers are not set."""
        shape = (*piece.shape[:2], rows, piece.shape[-1])
        count = math.prod(shape)
        if self._memory is None or self._memory.numel() < count or self._memory.dtype != piece.dtype:
            self._memory = None  # The old memory is freed before the new one is taken.
            self._memory = piece.new_empty(count)
        return self._memory[:count].view(shape)


def by_chunks(
    chunks: Iterator[range], count: int, render: Callable[[range], Tensor | None], buffer: Buffer
) -> AdditiveMask:
    """The additive mask of `count` queries, from `render`, which gives the numbers (..., t, s) of some of them.

    None from `render` stands for numbers that are all 0.
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
            whole = buffer.like(piece, count)
            whole[:, :, : rows.start] = 0.0
            live = live.repeat(*piece.shape[:2], 1)
        whole[:, :, rows.start : rows.stop] = piece
        live[:, :, rows.start : rows.stop] = (piece > -torch.inf).any(-1)
    return AdditiveMask(whole, None if bool(live.all()) else live)
