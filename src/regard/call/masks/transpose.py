"""Masks with the roles of query and key swapped."""

from dataclasses import dataclass

from torch import Tensor

from regard.call.masks.base import And, DenseMask, Mask, Not, Or
from regard.call.masks.basic import Causal
from regard.call.masks.patterns import Blocks, Documents, Strided, Window
from regard.call.masks.selection import SelectedMask
from regard.call.shapes import Sizes

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
        case SelectedMask(inner, batches, heads):
            return SelectedMask(swapped(inner), batches, heads)
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
