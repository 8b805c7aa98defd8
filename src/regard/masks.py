"""Who MAY attend to whom. True = keep, everywhere.

A mask is a predicate on absolute positions, `allowed(batch, head, query, key)`, and every rendering (a
dense tensor, a tile, a range of keys, a drawing) asks the same predicate, so that none can disagree.
Masks combine with `&`, `|` and `~`.

    lengths(n)             key < n                      one length per sequence
    lengths(n, per_query)  key < n[query]               one length per query (d2l's 2-D valid_lens)
    padding(keep)          keep[key]                    from a bool tensor, or from tokens and a pad id
    causal()               key <= query + S - T         the last query sees the last key
    causal(offset)         key <= query + offset        query i stands at position offset + i
    predicate(function)    function(batch, head, query, key)
    a bool tensor          tensor[..., query, key]

and, in `regard.patterns`, windows, prefixes, packed documents, strides and blocks.

A mask is built before it knows the call it will serve. `bind` resolves it against the call's sizes
(causal's default offset, the shape of lengths), and checks it there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import ArgumentError, RegardError, ShapeError
from regard.shapes import Sizes, canonical_pairwise, canonical_per_sequence
from regard.transforms import can_look

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

AXES = frozenset({"batch", "head", "query", "key"})
FLEX_BLOCK = 128
"""Queries, and keys, of one block of FlexAttention's."""


class Mask(ABC):
    """A predicate on positions. Subclasses say `allowed`, and what they know of their structure."""

    @abstractmethod
    def allowed(
        self,
        batch: Int[Tensor, "..."],
        head: Int[Tensor, "..."],
        query: Int[Tensor, "..."],
        key: Int[Tensor, "..."],
    ) -> Bool[Tensor, "..."]:
        """True where the query may attend to the key, for index tensors that broadcast together.

        The answer is only as large as the positions it depends on: a mask on keys alone answers with
        the shape of `key` (and batch), whatever the number of queries.
        """

    def depends_on(self) -> frozenset[str]:
        """Which of batch, head, query and key the predicate looks at; all, unless a subclass knows less."""
        return AXES

    def key_range(self, rows: range, sizes: Sizes) -> range:
        """The keys outside which no query of `rows` may attend; all keys, unless a subclass knows less."""
        return range(sizes.keys)

    def row_cuts(self, sizes: Sizes) -> list[int]:
        """Rows at which a block of queries had better begin, since what may be attended to changes there."""
        return []

    def covers(self, rows: range, columns: range) -> bool:
        """Whether every query of `rows` may attend to every key of `columns`; False where that is not known cheaply."""
        return False

    def is_relative(self) -> bool:
        """Whether the predicate looks at key - query alone, so that blocks along a diagonal are alike."""
        return False

    def bind(self, sizes: Sizes, device: torch.device) -> "Mask":
        """Resolve the mask against a call: definite offsets, flat batch, tensors on the call's device."""
        return self

    def factors(self) -> tuple["Mask", ...]:
        """The masks whose conjunction this is."""
        return (self,)

    def dense(self, sizes: Sizes, device: torch.device | str = "cpu") -> Bool[Tensor, "..."]:
        """The mask as one bool tensor of shape (B or 1, H or 1, T or 1, S or 1)."""
        device = torch.device(device)
        rows, columns = range(sizes.queries), range(sizes.keys)
        return render(self.bind(sizes, device), rows, columns, sizes=sizes, device=device)

    def block_mask(self, sizes: Sizes, device: torch.device | str = "cpu") -> "BlockMask":
        """The mask as FlexAttention's BlockMask, rendered for one row of blocks at a time."""
        from torch.nn.attention.flex_attention import BlockMask

        device = torch.device(device)
        bound = self.bind(sizes, device)

        # FlexAttention tells a mask by the number of a plain function's arguments.
        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return bound.allowed(batch, head, query, key)

        starts = range(0, sizes.queries, FLEX_BLOCK)
        rows = (range(start, min(start + FLEX_BLOCK, sizes.queries)) for start in starts)
        blocks = [_blocks(render(bound, r, range(sizes.keys), sizes=sizes, device=device), len(r), sizes) for r in rows]
        some, every = (torch.stack(list(kind), dim=2) for kind in zip(*blocks, strict=True))
        return BlockMask.from_kv_blocks(
            *_first_true(some & ~every),
            *_first_true(every),
            BLOCK_SIZE=FLEX_BLOCK,
            mask_mod=mask_mod,
            seq_lengths=(sizes.queries, sizes.keys),
        )

    def draw(self, queries: int = 12, keys: int | None = None) -> str:
        """The mask in characters, queries down and keys across, for one sequence and one head.

        >>> print(causal().draw(3))
        #..
        ##.
        ###
        """
        sizes = Sizes((), 1, 1, queries, queries if keys is None else keys, False)
        rows = self.dense(sizes).expand(1, 1, queries, sizes.keys)[0, 0].tolist()
        return "\n".join("".join("#" if allowed else "." for allowed in row) for row in rows)

    def __repr__(self) -> str:
        """Its name, and a drawing where it needs no batch."""
        try:
            return f"{self}\n{self.draw()}"
        except (RegardError, IndexError, RuntimeError):
            return str(self)

    def __and__(self, other: "Mask") -> "Mask":
        return And((*self.factors(), *other.factors())) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: "Mask") -> "Mask":
        return Or((self, other)) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> "Mask":
        return Not(self)


def render(
    mask: Mask, rows: range | Tensor, columns: range | Tensor, *, sizes: Sizes, device: torch.device
) -> Bool[Tensor, "..."]:
    """The block of a bound mask for some rows and columns: (B or 1, H or 1, t or 1, s or 1)."""
    axes = mask.depends_on()
    # An axis that the mask does not look at is asked for one position.
    batch = torch.arange(sizes.flat_batch if "batch" in axes else 1, device=device)[:, None, None, None]
    head = torch.arange(sizes.heads if "head" in axes else 1, device=device)[:, None, None]
    allowed = mask.allowed(batch, head, _positions(rows, device)[:, None], _positions(columns, device))
    return allowed[(None,) * (4 - allowed.dim())]


def _blocks(allowed: Tensor, rows: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Of one row of blocks, which hold a pair that is allowed, and which hold no other: (B or 1, H or 1, blocks)."""
    allowed = allowed.expand(*allowed.shape[:2], rows, sizes.keys)
    # What lies beyond the last query or key is not allowed.
    padded = torch.nn.functional.pad(allowed, (0, -sizes.keys % FLEX_BLOCK, 0, FLEX_BLOCK - rows))
    counts = padded.unflatten(-1, (-1, FLEX_BLOCK)).sum((-3, -1))
    return counts > 0, counts == FLEX_BLOCK**2


def _first_true(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many of each row are chosen, and which: their indices first, in order."""
    order = torch.argsort(chosen.to(torch.uint8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _positions(where: range | Tensor, device: torch.device) -> Tensor:
    return torch.arange(where.start, where.stop, device=device) if isinstance(where, range) else where


# -- the masks ---------------------------------------------------------------------------------------


def lengths(valid: Int[Tensor, "..."] | int, *, per_query: bool = False) -> Mask:
    """Attend to the first n keys: True where key < n.

    Args:
        valid: n, of the batch's shape; with `per_query`, or one more dimension of size T, one n for each
            query. A length of 0 leaves the row no key: its weights and output are 0.
        per_query: whether the last dimension of `valid` counts queries. Only needed where the shape
            leaves it open (T queries without a batch).

    Raises:
        ShapeError: `valid` is not made of integers, or (when the mask meets a call) its shape does not fit.

    >>> lengths(torch.tensor([1, 3])).dense(Sizes((2,), 1, 1, 1, 3, False)).squeeze()
    tensor([[ True, False, False],
            [ True,  True,  True]])
    """
    tensor = torch.as_tensor(valid)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ShapeError(f"lengths must be integers, got {tensor.dtype}; for a bool mask use padding()")
    return Lengths(tensor, per_query)


def padding(tokens: Tensor, pad_id: int | None = None) -> Mask:
    """Attend to real tokens only.

    Args:
        tokens: (batch..., S); bool with True = a real token, or token ids together with `pad_id`.
        pad_id: the id of the padding token.

    Raises:
        ShapeError: ids without a `pad_id`, or a float mask.

    >>> padding(torch.tensor([[5, 7, 0]]), pad_id=0).dense(Sizes((1,), 1, 1, 1, 3, False)).squeeze()
    tensor([ True,  True, False])
    """
    if pad_id is not None:
        return Padding(tokens != pad_id)
    if tokens.dtype != torch.bool:
        raise ShapeError(f"padding() takes a bool tensor (True = keep) or ids with pad_id=, got {tokens.dtype}")
    return Padding(tokens)


def causal(offset: int | Int[Tensor, " B"] | None = None) -> Mask:
    """Attend to the present and the past: True where key <= query + offset.

    Args:
        offset: query i stands at position offset + i. None aligns the last query with the last key
            (offset S - T), which is what a key-value cache needs; 0 aligns the first with the first
            (what torch's `is_causal` does). A tensor of the batch's shape gives each sequence its own.

    >>> causal().dense(Sizes((), 1, 1, 2, 3, False)).squeeze()
    tensor([[ True,  True, False],
            [ True,  True,  True]])
    """
    return Causal(offset)


def predicate(function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Mask:
    """A mask of one's own: `function(batch, head, query, key)` on index tensors that broadcast.

    >>> even = predicate(lambda batch, head, query, key: (query - key) % 2 == 0)
    >>> even.dense(Sizes((), 1, 1, 2, 3, False)).squeeze()
    tensor([[ True, False,  True],
            [False,  True, False]])
    """
    return Predicate(function)


def as_mask(mask: "Mask | Tensor | None") -> Mask | None:
    """A mask from what a caller may hand over: a `Mask`, a bool tensor (True = keep) or None.

    Raises:
        ShapeError: a float tensor, which is a bias.
    """
    if mask is None or isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return Dense(mask)
    what = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
    raise ShapeError(
        f"mask= takes a regard mask or a bool tensor (True = keep), got {what}; a float tensor goes in as bias="
    )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Lengths(Mask):
    """key < n. See `lengths`."""

    valid: Tensor
    per_query: bool = False

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        """Flatten the batch to (B,) or (B, T)."""
        valid, per_query = self.valid.to(device), self.per_query or self.valid.dim() == len(sizes.batch) + 1
        trailing = (sizes.queries,) if per_query else ()
        if valid.dim() == 0 and not trailing:
            valid = valid.expand(sizes.batch)
        flat = canonical_per_sequence(valid, sizes, *trailing, name="lengths")
        return Lengths(flat, per_query)

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Key < n."""
        return key < (self.valid[batch, query] if self.per_query else self.valid[batch])

    def depends_on(self) -> frozenset[str]:
        """Batch and key, and the query where each has its own length."""
        return frozenset({"batch", "key", "query"} if self.per_query else {"batch", "key"})

    def key_range(self, rows: range, sizes: Sizes) -> range:
        """Up to the longest."""
        if not can_look(self.valid) or not self.valid.numel():
            return range(sizes.keys)
        return range(max(0, min(sizes.keys, int(self._of(rows).max()))))

    def covers(self, rows: range, columns: range) -> bool:
        """Up to the shortest."""
        return can_look(self.valid) and bool((self._of(rows) >= columns.stop).all())

    def _of(self, rows: range) -> Tensor:
        return self.valid[:, rows.start : rows.stop] if self.per_query else self.valid

    def __str__(self) -> str:
        return "lengths per query" if self.per_query else "lengths"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Padding(Mask):
    """keep[key]. See `padding`."""

    keep: Tensor

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        """Flatten the batch to (B, S)."""
        keep = self.keep.to(device)
        if keep.dim() == 1 and sizes.batch:
            keep = keep.expand(*sizes.batch, keep.shape[0])
        return Padding(canonical_per_sequence(keep, sizes, sizes.keys, name="padding"))

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """keep[batch, key]."""
        return self.keep[batch, key]

    def depends_on(self) -> frozenset[str]:
        """Batch and key."""
        return frozenset({"batch", "key"})

    def covers(self, rows: range, columns: range) -> bool:
        """Where all of the keys are real."""
        return can_look(self.keep) and bool(self.keep[:, columns.start : columns.stop].all())

    def __str__(self) -> str:
        return "padding"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Causal(Mask):
    """Key <= query + offset. See `causal`."""

    offset: int | Tensor | None = None

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        """Align the last query with the last key where no offset was given."""
        if self.offset is None:
            return Causal(sizes.keys - sizes.queries)
        if isinstance(self.offset, int):
            return Causal(self.offset)
        offset = self.offset.to(device)
        return Causal(canonical_per_sequence(offset, sizes, name="causal's offset"))

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Key <= query + offset."""
        offset = self.offset[batch] if isinstance(self.offset, Tensor) else self.offset
        if offset is None:
            raise ArgumentError("this causal mask has not met a call yet: bind it, or give it an offset")
        return key <= query + offset

    def depends_on(self) -> frozenset[str]:
        """Query and key, and the batch where each sequence has its own offset."""
        return frozenset({"batch", "query", "key"} if isinstance(self.offset, Tensor) else {"query", "key"})

    def key_range(self, rows: range, sizes: Sizes) -> range:
        """Up to the last row's own position."""
        if not isinstance(self.offset, int):
            return range(sizes.keys)
        return range(max(0, min(sizes.keys, rows.stop + self.offset)))

    def covers(self, rows: range, columns: range) -> bool:
        """What lies before the first row's own position."""
        return isinstance(self.offset, int) and columns.stop <= rows.start + self.offset + 1

    def is_relative(self) -> bool:
        """With one offset."""
        return isinstance(self.offset, int)

    def __str__(self) -> str:
        return "causal"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Predicate(Mask):
    """A function of the caller's. See `predicate`."""

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """What the function says."""
        answer = self.function(batch, head, query, key)
        if not isinstance(answer, Tensor) or answer.dtype != torch.bool:
            raise ShapeError(f"a mask's predicate must return a bool tensor, got {answer!r}")
        return answer

    def __str__(self) -> str:
        return getattr(self.function, "__name__", "predicate").replace("<lambda>", "predicate")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Dense(Mask):
    """A bool tensor of the caller's, True = keep: the input's rank with each dimension full or 1, or (T, S)."""

    tensor: Tensor

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        """Give the tensor the canonical rank."""
        return Dense(canonical_pairwise(self.tensor.to(device), sizes, "mask"))

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Tensor[batch, head, query, key], where dimensions of size 1 serve every index."""
        index = (batch, head, query, key)
        zero = torch.zeros_like(batch)
        return self.tensor[tuple(i if n > 1 else zero for i, n in zip(index, self.tensor.shape, strict=True))]

    def depends_on(self) -> frozenset[str]:
        """The dimensions that are not 1."""
        axes = ("batch", "head", "query", "key")
        if self.tensor.dim() != 4:
            return AXES
        return frozenset(axis for axis, n in zip(axes, self.tensor.shape, strict=True) if n > 1)

    def __str__(self) -> str:
        return "a dense mask"


# -- combinations --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class And(Mask):
    """Where all agree."""

    masks: tuple[Mask, ...]

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        """Bind each."""
        return And(tuple(mask.bind(sizes, device) for mask in self.masks))

    def factors(self) -> tuple[Mask, ...]:
        """The masks themselves."""
        return self.masks

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """True where all are."""
        answer = self.masks[0].allowed(batch, head, query, key)
        for mask in self.masks[1:]:
            answer = answer & mask.allowed(batch, head, query, key)
        return answer

    def depends_on(self) -> frozenset[str]:
        """All that any depends on."""
        return frozenset(axis for mask in self.masks for axis in mask.depends_on())

    def key_range(self, rows: range, sizes: Sizes) -> range:
        """The intersection of the ranges."""
        ranges = [mask.key_range(rows, sizes) for mask in self.masks]
        start = max(r.start for r in ranges)
        return range(start, max(start, min(r.stop for r in ranges)))

    def row_cuts(self, sizes: Sizes) -> list[int]:
        """Every mask's."""
        return sorted({cut for mask in self.masks for cut in mask.row_cuts(sizes)})

    def covers(self, rows: range, columns: range) -> bool:
        """Where all do."""
        return all(mask.covers(rows, columns) for mask in self.masks)

    def is_relative(self) -> bool:
        """If all are."""
        return all(mask.is_relative() for mask in self.masks)

    def __str__(self) -> str:
        return " & ".join(f"({mask})" if isinstance(mask, Or) else str(mask) for mask in self.masks)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Or(Mask):
    """Where any agrees."""

    masks: tuple[Mask, ...]

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        """Bind each."""
        return Or(tuple(mask.bind(sizes, device) for mask in self.masks))

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """True where any is."""
        answer = self.masks[0].allowed(batch, head, query, key)
        for mask in self.masks[1:]:
            answer = answer | mask.allowed(batch, head, query, key)
        return answer

    def depends_on(self) -> frozenset[str]:
        """All that any depends on."""
        return frozenset(axis for mask in self.masks for axis in mask.depends_on())

    def key_range(self, rows: range, sizes: Sizes) -> range:
        """The hull of the ranges that are not empty."""
        ranges = [mask.key_range(rows, sizes) for mask in self.masks]
        ranges = [r for r in ranges if r]
        return range(min(r.start for r in ranges), max(r.stop for r in ranges)) if ranges else range(0)

    def row_cuts(self, sizes: Sizes) -> list[int]:
        """Every mask's."""
        return sorted({cut for mask in self.masks for cut in mask.row_cuts(sizes)})

    def covers(self, rows: range, columns: range) -> bool:
        """Where one of them does."""
        return any(mask.covers(rows, columns) for mask in self.masks)

    def is_relative(self) -> bool:
        """If all are."""
        return all(mask.is_relative() for mask in self.masks)

    def __str__(self) -> str:
        return " | ".join(str(mask) for mask in self.masks)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Not(Mask):
    """Where the mask says no. Its range of keys is unknown, so that nothing is skipped."""

    mask: Mask

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        """Bind the inner mask."""
        return Not(self.mask.bind(sizes, device))

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Not what the mask says."""
        return ~self.mask.allowed(batch, head, query, key)

    def depends_on(self) -> frozenset[str]:
        """What the mask depends on."""
        return self.mask.depends_on()

    def is_relative(self) -> bool:
        """As the mask is."""
        return self.mask.is_relative()

    def __str__(self) -> str:
        return f"~({self.mask})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Selected(Mask):
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
        chosen = (Selected(mask, self.batches, self.heads) for mask in factors)
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
