"""The block lists of a `BlockMask`: a compiled FlexAttention asks its `mask_mod` only in the blocks listed as partial.

It takes all pairs of a full block, and none of an unlisted one. The lists may say something else than the function, as
after `block_mask.mask_mod` was replaced. Uncompiled, torch asks the function alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PARTIAL, FULL = 1, 2
Allowed = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class BlockLists:
    """The kind of each block: PARTIAL, FULL, or 0 for an unlisted one."""

    kinds: Tensor
    """(B or 1, H or 1, blocks of queries, blocks of keys), uint8."""
    queries: int
    """The queries of a block,"""
    keys: int
    """and its keys."""

    @classmethod
    def of(cls, block_mask: tuple[Any, ...]) -> "BlockLists":
        """Read the tuple that FlexAttention's operator gets: the counts and indices of partial blocks, those of full
        ones, and at its end the sizes of a block and the function."""
        partial_count, partial, full_count, full = block_mask[2:6]
        kinds = torch.zeros(partial.shape, dtype=torch.uint8, device=partial.device)
        for kind, count, indices in ((PARTIAL, partial_count, partial), (FULL, full_count, full)):
            if count is not None:
                listed = torch.arange(indices.shape[-1], device=indices.device) < count[..., None]
                # Places beyond the count may repeat a listed block: they leave it as it is.
                kinds.scatter_reduce_(-1, indices.long(), (listed * kind).to(kinds.dtype), "amax")
        return cls(kinds, int(block_mask[-3]), int(block_mask[-2]))

    def over(self, allowed: Allowed) -> Allowed:
        """The pairs that the kernel visits and the function allows, or that it takes unasked."""
        batches, heads, rows, columns = self.kinds.shape

        def visited(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            row = (query // self.queries).clamp_max(rows - 1)
            column = (key // self.keys).clamp_max(columns - 1)
            kind = self.kinds[batch.clamp_max(batches - 1), head.clamp_max(heads - 1), row, column]
            return (kind == FULL) | ((kind == PARTIAL) & allowed(batch, head, query, key))

        return visited
