"""A mask of some heads of a larger call."""

from dataclasses import dataclass

from torch import Tensor

from regard.mechanisms.masks.base import Mask
from regard.mechanisms.shapes import Sizes


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SelectedMask(Mask):
    """A bound mask seen through a choice of (batch, head) pairs: pair n stands in batch row n, head 0."""

    mask: Mask
    batches: Tensor
    heads: Tensor

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """What the mask says of the pair."""
        return self.mask.allowed(self.batches[batch], self.heads[batch], query, key)

    def depends_on(self) -> frozenset[str]:
        """Heads have become batch rows."""
        inner = self.mask.depends_on()
        return frozenset("batch" if axis == "head" else axis for axis in inner)

    def factors(self) -> tuple[Mask, ...]:
        """The mask's own, each seen through the choice if it looks at batch or head."""
        factors = self.mask.factors()
        chosen = (SelectedMask(mask, self.batches, self.heads) for mask in factors)
        return tuple(
            seen if {"batch", "head"} & mask.depends_on() else mask for mask, seen in zip(factors, chosen, strict=True)
        )

    def key_range(self, rows: range, sizes: Sizes) -> range:
        """The mask's own, which holds for every pair."""
        return self.mask.key_range(rows, sizes)

    def covers(self, rows: range, columns: range) -> bool:
        """As the mask does, for every pair."""
        return self.mask.covers(rows, columns)

    def is_relative(self) -> bool:
        """As the mask is."""
        return self.mask.is_relative()

    def __str__(self) -> str:
        return str(self.mask)
