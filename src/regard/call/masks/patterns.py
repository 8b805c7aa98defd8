"""Structured masks, to skip blocks: windows, prefixes, packed documents, strides, blocks.

    window(W)              the last W keys, including the query's own
    prefix(n)              causal, but every query sees the first n keys
    documents(ids)         the keys of the query's own document, for sequences packed into one row
    strided(n)             every n-th key before and after the query's own position
    blocks(pattern, size)  a coarse pattern of size x size blocks

Each mask computes the range of keys of a block of queries, and nothing outside is computed. As everywhere, query i
stands at position offset + i, and the default offset is S - T.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Integer
from torch import Tensor

from regard.call.masks.base import Mask
from regard.call.masks.basic import causal, lengths
from regard.call.shapes import Sizes, canonical_per_sequence, counted, owned
from regard.errors import ArgumentError, ShapeError, require, require_whole
from regard.tensors.guards import can_look, has_values, in_transform
from regard.tensors.kinds import refuse_wrong_kinds


@refuse_wrong_kinds
def window(
    size: int,
    *,
    side: Literal["left", "right", "both"] = "left",
    offset: int | Integer[Tensor, " B"] | None = None,
) -> Mask:
    """Attend to `size` keys around the query's own position, which is one of them.

    Args:
        size: W. "left" sees the positions p - W + 1 .. p (sliding-window attention, already causal); "right" sees p ..
            p + W - 1; "both" sees W positions with p in the middle, and W must be odd.
        side: "left", "right" or "both".
        offset: query i stands at offset + i; default S - T. A tensor of the batch's shape gives each sequence its own.

    Raises:
        ArgumentError: the size is below 1, or it is even with "both", or the side is another.

    >>> window(2).dense(Sizes((), 1, 1, 3, 3, False)).int().squeeze()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    require_whole(size=size)
    if size < 1 or (side == "both" and size % 2 == 0):
        raise ArgumentError(f"window counts keys, the query's own included: at least 1, odd for 'both'; got {size}")
    reach = {"left": (size - 1, 0), "right": (0, size - 1), "both": (size // 2, size // 2)}
    if side not in reach:
        raise ArgumentError(f"side must be one of {', '.join(reach)}; got {side!r}")
    before, after = reach[side]
    return Window(before, after, offset)


def prefix(size: int | Integer[Tensor, "..."]) -> Mask:
    """Causal, but every query sees the first `size` keys: the mask of a prefix language model.

    Source: Raffel et al. 2020 (arXiv:1910.10683), figure 4 ("causal with prefix").

    >>> prefix(2).dense(Sizes((), 1, 1, 3, 3, False)).int().squeeze()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    return lengths(size) | causal()


@refuse_wrong_kinds
def documents(
    ids: Integer[Tensor, "..."] | None = None,
    *,
    key_ids: Integer[Tensor, "..."] | None = None,
    offsets: Integer[Tensor, " N"] | None = None,
) -> Mask:
    """Attend within the query's own document, when several documents are packed into one sequence.

    Args:
        ids: the document of each query, (batch..., T), and of each key if there are as many keys as queries.
        key_ids: the document of each key, (batch..., S), if it differs from `ids`.
        offsets: instead of ids, the starts of the documents and the end of the last: 0, n_1, n_1 + n_2, ...

    Raises:
        ArgumentError: neither or both of ids and offsets are given, or the offsets do not rise from 0.
        ShapeError: the ids do not fit the call.

    >>> documents(offsets=torch.tensor([0, 2, 3])).dense(Sizes((), 1, 1, 3, 3, False)).int().squeeze()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    if (ids is None) == (offsets is None):
        raise ArgumentError("documents takes either ids or offsets")
    if ids is None:
        assert offsets is not None
        offsets = counted(offsets)
        steps = offsets.diff()
        if offsets.dim() != 1 or len(offsets) < 2 or int(offsets[0]) != 0 or bool((steps < 0).any()):
            raise ArgumentError(f"offsets must rise from 0 to the whole length, got {offsets.tolist()}")
        if offsets.is_floating_point():
            raise ShapeError(f"offsets must be whole numbers, got {offsets.dtype}")
        ids = torch.arange(len(steps), device=offsets.device).repeat_interleave(steps)
    return Documents(ids, ids if key_ids is None else key_ids)


def strided(stride: int, *, offset: int | None = None) -> Mask:
    """Attend to every `stride`-th key, counted from the query's own position.

    Source: Child et al. 2019 (arXiv:1904.10509), section 4.2; their strided pattern is
    `causal() & (window(n) | strided(n))`.

    Raises:
        ArgumentError: a stride below 1.

    >>> strided(2).dense(Sizes((), 1, 1, 2, 4, False)).int().squeeze()
    tensor([[1, 0, 1, 0],
            [0, 1, 0, 1]], dtype=torch.int32)
    """
    require_whole(stride=stride)
    if stride < 1:
        raise ArgumentError(f"stride must be at least 1, got {stride}")
    return Strided(stride, offset)


def blocks(pattern: Bool[Tensor, "..."], size: int) -> Mask:
    """Attend where a coarse pattern allows it: query i sees key j where pattern[..., i // size, j // size].

    Args:
        pattern: bool (rows, columns), or (H, rows, columns) with a pattern for each head.
        size: the number of queries, and of keys, in a block.

    Raises:
        ShapeError: the pattern is not bool, or does not cover the call.

    >>> blocks(torch.eye(2, dtype=torch.bool), 2).dense(Sizes((), 1, 1, 3, 3, False)).int().squeeze()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    require(pattern, Tensor, "pattern", "a bool tensor")
    require_whole(size=size)
    if pattern.dtype != torch.bool or pattern.dim() not in (2, 3) or size < 1:
        raise ShapeError(
            f"blocks takes a bool pattern (rows, columns) or (H, rows, columns) and a size of at least 1, "
            f"got {pattern.dtype} {tuple(pattern.shape)} and {size}"
        )
    return Blocks(pattern if pattern.dim() == 3 else pattern[None], size)


@dataclass(frozen=True, slots=True, repr=False)
class Window(Mask):
    """`position - before <= key <= position + after`. See `window`."""

    before: int
    after: int
    offset: int | Tensor | None = None
    """A tensor (B,) gives each sequence its own, as in `causal`."""

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        if isinstance(self.offset, Tensor):
            of_each = canonical_per_sequence(counted(self.offset, device), sizes, name="the offset of a window")
            return Window(self.before, self.after, of_each)
        return Window(self.before, self.after, sizes.keys - sizes.queries if self.offset is None else self.offset)

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        offset = self.offset[batch] if isinstance(self.offset, Tensor) else _bound(self.offset)
        place = query + offset  # small tensors alone have integers: distances would be T x S of them
        return (key >= place - self.before) & (key <= place + self.after)

    def depends_on(self) -> frozenset[str]:
        return frozenset({"batch", "query", "key"} if isinstance(self.offset, Tensor) else {"query", "key"})

    def key_range(self, rows: range, sizes: Sizes) -> range:
        if isinstance(self.offset, Tensor):
            return range(sizes.keys)
        offset = _bound(self.offset)
        return _clip(rows.start + offset - self.before, rows.stop + offset + self.after, sizes.keys)

    def covers(self, rows: range, columns: range) -> bool:
        if isinstance(self.offset, Tensor):
            return False
        first, last = rows.start + _bound(self.offset), rows.stop - 1 + _bound(self.offset)
        return columns.start >= last - self.before and columns.stop - 1 <= first + self.after

    def is_relative(self) -> bool:
        return not isinstance(self.offset, Tensor)

    def __str__(self) -> str:
        size, sides = self.before + self.after + 1, {(True, False): "", (False, True): " to the right"}
        return f"window of {size}{sides.get((self.before > 0, self.after > 0), ' in the middle')}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Documents(Mask):
    """`id of the query == id of the key`. See `documents`."""

    ids: Tensor
    key_ids: Tensor
    places: "_Places | None" = None

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        ids = _per_sequence(self.ids, sizes, sizes.queries, "document ids of queries", device)
        key_ids = _per_sequence(self.key_ids, sizes, sizes.keys, "document ids of keys", device)
        # The ends of documents are values, and no graph may depend on values; numpy cannot read torch.func's tensors.
        if not has_values(ids) or not ids.numel() or in_transform("Vmap", "Jvp", "Grad"):
            return Documents(ids, key_ids)
        return Documents(ids, key_ids).placed()

    def placed(self) -> "Documents":
        return Documents(self.ids, self.key_ids, _Places.of(self.ids.cpu(), self.key_ids.cpu()))

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.ids[batch, query] == self.key_ids[batch, key]

    def depends_on(self) -> frozenset[str]:
        return frozenset({"batch", "query", "key"})

    def key_range(self, rows: range, sizes: Sizes) -> range:
        if self.places is None:
            return range(sizes.keys)
        return _clip(*self.places.seen_by(rows), sizes.keys)

    def covers(self, rows: range, columns: range) -> bool:
        return self.places is not None and self.places.is_one_document(rows, columns)

    def row_cuts(self, sizes: Sizes) -> list[int]:
        if self.places is None:
            return []
        change = (self.ids[:, 1:] != self.ids[:, :-1]).all(0)
        return (change.nonzero().squeeze(-1) + 1).tolist()

    def __str__(self) -> str:
        return "documents"


@dataclass(frozen=True, slots=True, repr=False)
class Strided(Mask):
    """`(position - key) % stride == 0`. See `strided`."""

    stride: int
    offset: int | None = None

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        return Strided(self.stride, sizes.keys - sizes.queries if self.offset is None else self.offset)

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query + _bound(self.offset)) % self.stride == key % self.stride

    def depends_on(self) -> frozenset[str]:
        return frozenset({"query", "key"})

    def is_relative(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"strided by {self.stride}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Blocks(Mask):
    """`pattern[head, query // size, key // size]`. See `blocks`."""

    pattern: Tensor
    size: int

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        heads, rows, columns = self.pattern.shape
        if rows * self.size < sizes.queries or columns * self.size < sizes.keys or heads not in (1, sizes.heads):
            raise ShapeError(
                f"a pattern {tuple(self.pattern.shape)} of blocks of {self.size} does not cover "
                f"{sizes.heads} heads, {sizes.queries} queries and {sizes.keys} keys"
            )
        return Blocks(owned(self.pattern, device), self.size)

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        head = head if len(self.pattern) > 1 else torch.zeros_like(head)
        return self.pattern[head, query // self.size, key // self.size]

    def depends_on(self) -> frozenset[str]:
        return frozenset({"query", "key", "head"} if len(self.pattern) > 1 else {"query", "key"})

    def key_range(self, rows: range, sizes: Sizes) -> range:
        if not has_values(self.pattern) or in_transform("Vmap"):
            return range(sizes.keys)
        part = self.pattern[:, rows.start // self.size : -(-rows.stop // self.size)].flatten(0, 1).any(0)
        where = part.nonzero()
        if not len(where):
            return range(0)
        return _clip(int(where[0]) * self.size, (int(where[-1]) + 1) * self.size, sizes.keys)

    def covers(self, rows: range, columns: range) -> bool:
        down, across = (slice(r.start // self.size, -(-r.stop // self.size)) for r in (rows, columns))
        return can_look(self.pattern) and bool(self.pattern[:, down, across].all())

    def row_cuts(self, sizes: Sizes) -> list[int]:
        return list(range(self.size, sizes.queries, self.size))

    def __str__(self) -> str:
        return f"blocks of {self.size}"


def _bound(offset: int | None) -> int:
    if offset is None:
        raise ArgumentError("this mask has not met a call yet: bind it, or give it an offset")
    return offset


def _clip(start: int, stop: int, length: int) -> range:
    start = max(0, min(length, start))
    return range(start, max(start, min(length, stop)))


def _per_sequence(ids: Tensor, sizes: Sizes, length: int, name: str, device: torch.device) -> Tensor:
    if ids.dim() == 1 and sizes.batch:
        ids = ids.expand(*sizes.batch, ids.shape[0])
    return canonical_per_sequence(counted(ids, device), sizes, length, name=name)


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """The extents of the documents of bound ids. They are on the CPU, where numpy answers small queries fast."""

    first: Tensor
    """For each query (T,): the first key of its document, the smallest over the batch."""
    last: Tensor
    """For each query (T,): the index after the last key of its document, the greatest over the batch."""
    ids: tuple[Tensor, Tensor]
    """The ids of the queries (B, T) and of the keys (B, S)."""
    changes: tuple[Tensor, Tensor]
    """For each query and for each key: the number of document changes so far, in any sequence of the batch."""

    @classmethod
    def of(cls, ids: Tensor, key_ids: Tensor) -> "_Places":
        first, last = _extent(ids.numpy(), key_ids.numpy())
        changes = ((a.diff(dim=1, prepend=a[:, :1]) != 0).any(0).cumsum(0) for a in (ids, key_ids))
        return cls(torch.from_numpy(first), torch.from_numpy(last), (ids, key_ids), (next(changes), next(changes)))

    def seen_by(self, rows: range) -> tuple[int, int]:
        first, last = (_array(t)[rows.start : rows.stop] for t in (self.first, self.last))
        return int(first.min()), int(last.max())

    def is_one_document(self, rows: range, columns: range) -> bool:
        down, across = (_array(t) for t in self.changes)
        if down[rows.stop - 1] != down[rows.start] or across[columns.stop - 1] != across[columns.start]:
            return False
        ids, key_ids = (_array(t) for t in self.ids)
        return bool((ids[:, rows.start] == key_ids[:, columns.start]).all())


def _array(tensor: Tensor) -> np.ndarray:
    # The masks moved together with their map, perhaps to a GPU.
    return tensor.cpu().numpy()


def _extent(ids: np.ndarray, key_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each query: the first key of its document and the index after the last, the widest over the batch."""
    first, last = [], []
    for of_query, of_key in zip(ids, key_ids, strict=True):
        is_sorted = bool((of_key[1:] >= of_key[:-1]).all())
        order = None if is_sorted else np.argsort(of_key, kind="stable")
        in_order = of_key if order is None else of_key[order]
        # Documents begin where their id first occurs. A stable order keeps the keys of a document in order.
        begin, end = (np.searchsorted(in_order, of_query, side) for side in ("left", "right"))
        none = begin == end
        begin, end = np.minimum(begin, len(of_key) - 1), np.maximum(end - 1, 0)
        begin, end = (begin, end) if order is None else (order[begin], order[end])
        first.append(np.where(none, len(of_key), begin))
        last.append(np.where(none, 0, end + 1))
    return np.min(first, axis=0), np.max(last, axis=0)
