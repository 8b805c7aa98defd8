"""A mask of some heads of a larger call."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.call.masks.base import Mask
from regard.call.shapes import Rows, Sizes


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PartMask(Mask):
    mask: Mask
    rows: Tensor
    columns: Tensor

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.mask.allowed(batch, head, self.rows[query], self.columns[key])

    def depends_on(self) -> frozenset[str]:
        return self.mask.depends_on()

    def __str__(self) -> str:
        return str(self.mask)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SelectedMask(Mask):
    """A bound mask with a choice of (batch, head) pairs: pair n stands in batch row n, head 0."""

    mask: Mask
    batches: Tensor
    heads: Tensor

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if {"batch", "head"} & self.mask.depends_on():
            batch, head = self.batches[batch], self.heads[batch]
        return self.mask.allowed(batch, head, query, key)

    def block(self, rows: Rows, columns: Rows, *, sizes: Sizes, device: torch.device) -> Tensor:
        if {"batch", "head"} & self.mask.depends_on():
            return Mask.block(self, rows, columns, sizes=sizes, device=device)
        return self.mask.block(rows, columns, sizes=sizes, device=device)

    def depends_on(self) -> frozenset[str]:
        inner = self.mask.depends_on()
        return frozenset("batch" if axis == "head" else axis for axis in inner)

    def factors(self) -> tuple[Mask, ...]:
        factors = self.mask.factors()
        chosen = (SelectedMask(mask, self.batches, self.heads) for mask in factors)
        return tuple(
            seen if {"batch", "head"} & mask.depends_on() else mask for mask, seen in zip(factors, chosen, strict=True)
        )

    def key_range(self, rows: range, sizes: Sizes) -> range:
        return self.mask.key_range(rows, sizes)

    def covers(self, rows: range, columns: range) -> bool:
        return self.mask.covers(rows, columns)

    def is_relative(self) -> bool:
        return self.mask.is_relative()

    def __str__(self) -> str:
        return str(self.mask)
