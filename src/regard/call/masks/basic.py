"""The usual masks: lengths, padding, causality, a tensor, any predicate."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from types import NoneType

import torch
from jaxtyping import Integer
from torch import Tensor

from regard.call.masks.base import DenseMask, Mask
from regard.call.shapes import (
    MOST_COPIED,
    Rows,
    Sizes,
    canonical_per_sequence,
    counted,
    index_tensor,
    owned,
    take,
)
from regard.errors import ArgumentError, ShapeError, require
from regard.tensors.guards import can_look, has_values, is_compiling, offset_and_shape
from regard.tensors.kinds import refuse_wrong_kinds


def lengths(valid: Integer[Tensor, "..."] | int, *, per_query: bool = False) -> Mask:
    """Attend to the first n keys: True where key < n.

    Args:
        valid: n, in the batch's shape: one n for each sequence. With `per_query`, or with one more dimension of
            size T: one n for each query. A row of length 0 has no key, and its weights and output are 0.
        per_query: whether the last dimension of `valid` counts queries. It is needed only if the shape is
            ambiguous (T queries without a batch).

    Raises:
        ShapeError: `valid` is not an integer tensor, or (in a call) its shape does not fit.

    >>> lengths(torch.tensor([1, 3])).dense(Sizes((2,), 1, 1, 1, 3, False)).squeeze()
    tensor([[ True, False, False],
            [ True,  True,  True]])
    """
    try:
        tensor = torch.as_tensor(valid)
    except (TypeError, ValueError, RuntimeError):
        raise ShapeError(f"lengths must be integers, got {type(valid).__name__}: {valid!r:.80}") from None
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ShapeError(f"lengths must be integers, got {tensor.dtype}; for a bool mask use padding()")
    return Lengths(tensor, per_query)


@refuse_wrong_kinds
def padding(ids: Tensor, pad_id: int | None = None) -> Mask:
    """Attend to real tokens only.

    Args:
        ids: (batch..., S); bool with True = a real token, or token ids together with `pad_id`.
        pad_id: the id of the padding token.

    Raises:
        ShapeError: ids are given without a `pad_id`, or the tensor is a float mask.

    >>> padding(torch.tensor([[5, 7, 0]]), pad_id=0).dense(Sizes((1,), 1, 1, 1, 3, False)).squeeze()
    tensor([ True,  True, False])
    """
    require(ids, Tensor, "tokens", "a bool tensor or ids with pad_id=")
    if pad_id is not None:
        return Padding(counted(ids) != pad_id)
    if ids.dtype != torch.bool:
        raise ShapeError(f"padding() takes a bool tensor (True = keep) or ids with pad_id=, got {ids.dtype}")
    return Padding(ids)


def causal(offset: int | Integer[Tensor, " B"] | None = None) -> Mask:
    """Attend to the present and the past: True where key <= query + offset.

    Args:
        offset: query i stands at position offset + i. The default S - T aligns the last query with the last key, as for
            a key-value cache. 0 aligns the first query with the first key, as torch's `is_causal` does. A tensor of the
            batch's shape gives each sequence its own offset.

    >>> causal().dense(Sizes((), 1, 1, 2, 3, False)).squeeze()
    tensor([[ True,  True, False],
            [ True,  True,  True]])
    """
    require(
        offset, (Integral, Tensor, torch.SymInt, NoneType), "causal's offset", "a whole number, or one of each sequence"
    )
    return Causal(offset)


def predicate(function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Mask:
    """A mask defined by the caller: `function(batch, head, query, key)` on index tensors that broadcast.

    >>> even = predicate(lambda batch, head, query, key: (query - key) % 2 == 0)
    >>> even.dense(Sizes((), 1, 1, 2, 3, False)).squeeze()
    tensor([[ True, False,  True],
            [False,  True, False]])
    """
    return Predicate(function)


def as_mask(mask: "Mask | Tensor | None") -> Mask | None:
    """The caller's mask as a `Mask`: a `Mask`, a bool tensor (True = keep), torch's `CausalBias` or None.

    Raises:
        ShapeError: a float tensor, which is a bias.
    """
    if mask is None or isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return DenseMask(mask)
    if (torchs := offset_and_shape(mask)) is not None:
        return _SizedCausal(*torchs)
    what = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
    hint = f"{'call it' if callable(mask) else 'make one'}, as in regard.causal()"
    if isinstance(mask, Tensor):
        hint = "a float tensor goes in as bias=" if mask.is_floating_point() else "valid lengths go in as lengths(...)"
    raise ShapeError(f"mask= takes a regard mask or a bool tensor (True = keep), got {what}; {hint}")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Lengths(Mask):
    """`key < n`. See `lengths`."""

    valid: Tensor
    per_query: bool = False

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        valid, per_query = counted(self.valid, device), self.per_query or self.valid.dim() == len(sizes.batch) + 1
        trailing = (sizes.queries,) if per_query else ()
        if valid.dim() == 0 and not trailing:
            valid = valid.expand(sizes.batch)
        flat = canonical_per_sequence(valid, sizes, *trailing, name="lengths")
        return Lengths(flat, per_query)

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < (self.valid[batch, query] if self.per_query else self.valid[batch])

    def block(self, rows: Rows, columns: Rows, *, sizes: Sizes, device: torch.device) -> Tensor:
        if self.per_query:
            return Mask.block(self, rows, columns, sizes=sizes, device=device)
        return index_tensor(columns, device) < self.valid.view(-1, 1, 1, 1)

    def depends_on(self) -> frozenset[str]:
        return frozenset({"batch", "key", "query"} if self.per_query else {"batch", "key"})

    def key_range(self, rows: range, sizes: Sizes) -> range:
        if not can_look(self.valid) or not self.valid.numel():
            return range(sizes.keys)
        most = int((self.valid[:, rows.start : rows.stop] if self.per_query else self.valid).max())
        return range(max(0, min(sizes.keys, most)))

    def covers(self, rows: range, columns: range) -> bool:
        if self.per_query:
            return can_look(self.valid) and bool((self.valid[:, rows.start : rows.stop] >= columns.stop).all())
        fewest = self.fewest_first_keys()
        return fewest is not None and fewest >= columns.stop

    def fewest_first_keys(self) -> int | None:
        if self.per_query or not can_look(self.valid):
            return None
        return int(self.valid.min()) if self.valid.numel() else None

    def __str__(self) -> str:
        return "lengths per query" if self.per_query else "lengths"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Padding(Mask):
    """`keep[key]`. See `padding`."""

    keep: Tensor

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        keep = owned(self.keep, device)
        if keep.dim() == 1 and sizes.batch:
            keep = keep.expand(*sizes.batch, keep.shape[0])
        return Padding(canonical_per_sequence(keep, sizes, sizes.keys, name="padding"))

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.keep[batch, key]

    def block(self, rows: Rows, columns: Rows, *, sizes: Sizes, device: torch.device) -> Tensor:
        # (Tensors of positions would take longer than a step of a generation.)
        return take(self.keep.mT, columns).mT[:, None, None]

    def depends_on(self) -> frozenset[str]:
        return frozenset({"batch", "key"})

    def covers(self, rows: range, columns: range) -> bool:
        return can_look(self.keep) and bool(self.keep[:, columns.start : columns.stop].all())

    def __str__(self) -> str:
        return "padding"


@dataclass(frozen=True, slots=True, repr=False)
class Causal(Mask):
    """`key <= query + offset`. See `causal`."""

    offset: int | Tensor | None = None

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        if self.offset is None:
            return Causal(sizes.keys - sizes.queries)
        if isinstance(self.offset, int):
            return Causal(self.offset)
        offset = counted(self.offset, device)
        return Causal(canonical_per_sequence(offset, sizes, name="causal's offset"))

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        offset = self.offset[batch] if isinstance(self.offset, Tensor) else self.offset
        if offset is None:
            raise ArgumentError("this causal mask has not met a call yet: bind it, or give it an offset")
        return key <= query + offset

    def depends_on(self) -> frozenset[str]:
        return frozenset({"batch", "query", "key"} if isinstance(self.offset, Tensor) else {"query", "key"})

    def key_range(self, rows: range, sizes: Sizes) -> range:
        if not isinstance(self.offset, int):
            return range(sizes.keys)
        return range(max(0, min(sizes.keys, rows.stop + self.offset)))

    def covers(self, rows: range, columns: range) -> bool:
        return isinstance(self.offset, int) and columns.stop <= rows.start + self.offset + 1

    def is_relative(self) -> bool:
        return isinstance(self.offset, int)

    def __str__(self) -> str:
        return "causal"


def causal_offset(mask: Mask) -> int | None:
    """Query i sees the keys up to i + offset; None for other masks, and for an offset for each sequence."""
    if not isinstance(mask, Causal) or not isinstance(mask.offset, int | torch.SymInt):
        return None
    return mask.offset


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _SizedCausal(Causal):
    """A causal mask that was made for (T, S), as torch's is."""

    shape: tuple[int, ...] = ()

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        if self.shape != (sizes.queries, sizes.keys):
            raise ShapeError(
                f"this causal mask is for (T, S) = {self.shape}, and the call has {(sizes.queries, sizes.keys)}: "
                "make it anew, or pass regard.causal(), which fits every call"
            )
        return Causal(self.offset)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Predicate(Mask):
    """A function given by the caller, which a call evaluates once where its pairs are few. See `predicate`."""

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        if is_compiling() or device.type == "meta":
            return self
        whole = sizes.flat_batch, sizes.heads, sizes.queries, sizes.keys
        if math.prod(whole) > MOST_COPIED:
            # Two queries and two keys tell on which of them it depends.
            corner = self.block(range(min(2, sizes.queries)), range(min(2, sizes.keys)), sizes=sizes, device=device)
            if math.prod(full for n, full in zip(corner.shape, whole, strict=True) if n > 1) > MOST_COPIED:
                return self
        allowed = self.block(range(sizes.queries), range(sizes.keys), sizes=sizes, device=device)
        # It may return a tensor that it holds.
        return Rendered(allowed.clone(), str(self)) if has_values(allowed) else self

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        answer = self.function(batch, head, query, key)
        if not isinstance(answer, Tensor) or answer.dtype != torch.bool:
            raise ShapeError(f"a mask's predicate must return a bool tensor, got {answer!r}")
        return answer

    def __str__(self) -> str:
        return getattr(self.function, "__name__", "predicate").replace("<lambda>", "predicate")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Rendered(DenseMask):
    name: str

    def __str__(self) -> str:
        return self.name
