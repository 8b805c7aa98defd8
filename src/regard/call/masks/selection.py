"""Masks made of a bound mask: that of some heads, queries or keys, and the one with queries and keys swapped."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.call.masks.base import And, DenseMask, Mask, Not, Or
from regard.call.masks.basic import Causal
from regard.call.masks.patterns import Blocks, Documents, Strided, Window
from regard.call.shapes import Rows, Sizes


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SelectedMask(Mask):
    """A bound mask with a choice: of (batch, head) pairs, where pair n stands in batch row n, head 0; or of queries and
    keys, by their places in the whole."""

    mask: Mask
    batches: Tensor | None = None
    heads: Tensor | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if self._chooses_heads(self.mask) and self.batches is not None and self.heads is not None:
            batch, head = self.batches[batch], self.heads[batch]
        if self.rows is not None and self.columns is not None:
            query, key = self.rows[query], self.columns[key]
        return self.mask.allowed(batch, head, query, key)

    def block(self, rows: Rows, columns: Rows, *, sizes: Sizes, device: torch.device) -> Tensor:
        if self.rows is not None or self._chooses_heads(self.mask):
            return Mask.block(self, rows, columns, sizes=sizes, device=device)
        return self.mask.block(rows, columns, sizes=sizes, device=device)

    def depends_on(self) -> frozenset[str]:
        inner = self.mask.depends_on()
        return inner if self.batches is None else frozenset("batch" if axis == "head" else axis for axis in inner)

    def factors(self) -> tuple[Mask, ...]:
        if self.rows is not None:
            return (self,)
        return tuple(replace(self, mask=m) if self._chooses_heads(m) else m for m in self.mask.factors())

    def key_range(self, rows: range, sizes: Sizes) -> range:
        return range(sizes.keys) if self.rows is not None else self.mask.key_range(rows, sizes)

    def covers(self, rows: range, columns: range) -> bool:
        return self.rows is None and self.mask.covers(rows, columns)

    def is_relative(self) -> bool:
        return self.rows is None and self.mask.is_relative()

    def _chooses_heads(self, mask: Mask) -> bool:
        return self.batches is not None and not {"batch", "head"}.isdisjoint(mask.depends_on())

    def __str__(self) -> str:
        return str(self.mask)


OTHER_ROLE = {"query": "key", "key": "query", "batch": "batch", "head": "head"}


def swapped(mask: Mask) -> Mask:
    """The bound mask with the keys of `mask` as queries, and its queries as keys.

    >>> from regard.call.masks.basic import causal
    >>> print(swapped(causal(1)).draw(4, 3))
    ###
    ###
    .##
    ..#
    """
    match mask:
        case And(masks):
            return And(tuple(swapped(m) for m in masks))
        case Or(masks):
            return Or(tuple(swapped(m) for m in masks))
        case Not(inner):
            return Not(swapped(inner))
        case SelectedMask(inner, batches, heads, rows, columns):
            return SelectedMask(swapped(inner), batches, heads, columns, rows)
        case DenseMask(tensor):
            return DenseMask(tensor.mT)
        case Causal(int(offset)):
            return NotBefore(-offset)
        case Window(before, after, int(offset)):
            return Window(after, before, -offset)
        case Strided(stride, int(offset)):
            return Strided(stride, -offset)
        case Blocks(pattern, size):
            return Blocks(pattern.mT, size)
        case Documents(ids, key_ids):
            sizes = Sizes((len(ids),), 1, 1, key_ids.shape[1], ids.shape[1], False)
            return Documents(key_ids, ids).bind(sizes, ids.device)
    return Swapped(mask)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NotBefore(Mask):
    """`key >= query + offset`: a causal mask with queries and keys swapped."""

    offset: int

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key >= query + self.offset

    def depends_on(self) -> frozenset[str]:
        return frozenset({"query", "key"})

    def key_range(self, rows: range, sizes: Sizes) -> range:
        return range(max(0, min(sizes.keys, rows.start + self.offset)), sizes.keys)

    def __str__(self) -> str:
        return "not before"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Swapped(Mask):
    """A bound mask with the roles swapped. Its range of keys is unknown, so no block is skipped."""

    mask: Mask

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.mask.allowed(batch, head, key, query)

    def depends_on(self) -> frozenset[str]:
        return frozenset(OTHER_ROLE[axis] for axis in self.mask.depends_on())

    def __str__(self) -> str:
        return f"{self.mask}, roles swapped"
