"""The legend of shapes, and the one place where query, key, value and bias are checked.

    B  batch (any number of dimensions)     T  queries       D  query/key dim
    H  query heads                          S  keys          E  value dim
    G  key/value heads (G divides H)

The layout is `(batch..., H, T, D)`; 3-D input is `(B, T, D)` with one head, and 2-D input is `(T, D)`. Inside the
package every tensor is canonical: `(B, H, T, D)` with one flat batch dimension. `Sizes` holds the rank of the input,
which outputs, masks, biases and maps follow.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.tensors.guards import State, autocast_dtype, is_autocasting, is_compiling, run_state

Dims = tuple[int, ...]
Rows = range | Tensor
"""Positions of queries or of keys: a range, or indices (n,)."""


@dataclass(frozen=True, slots=True)
class Sizes:
    batch: tuple[int, ...]
    heads: int
    kv_heads: int
    queries: int
    keys: int
    has_heads: bool
    """Whether the input had a dimension of heads (4-D and above)."""

    @property
    def flat_batch(self) -> int:
        """B: the product of the batch dimensions."""
        product = 1
        for size in self.batch:
            product *= size
        return product

    @property
    def leading(self) -> tuple[int, ...]:
        """The dimensions before (T, ...) in the caller's layout."""
        return (*self.batch, self.heads) if self.has_heads else self.batch

    @property
    def map_shape(self) -> tuple[int, ...]:
        """The shape of the weights in the caller's layout: (batch..., H, T, S)."""
        return (*self.leading, self.queries, self.keys)


DimensionName = Literal["batch", "window", "head", "unknown"]
"""The unit of a dimension before queries and keys: sequences, parts of a sequence, or heads."""
Sort = Literal["positions", "patches", "layers", "slots", "blocks", "positions and blocks", "unknown"]
"""The kind of queries or keys: positions of a sequence, patches of an image, outputs of layers, learned vectors, or
blocks of positions that a compressor made one key."""

BATCH: tuple[DimensionName, ...] = ("batch",)
UNKNOWN: tuple[DimensionName, ...] = ("unknown",)

UNNAMED = "an index or a function moved its dimensions: choose or average before it"


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The names of a map's dimensions, (leading..., queries, keys).

    The source of a map gives them, from evidence: the documentation of the call, the sizes that a module tells, the
    channels of a projection. Without evidence a name is "unknown", and `why` names the missing evidence.

    >>> import regard, torch
    >>> x = torch.eye(3).expand(2, 3, 3)
    >>> regard.attention(x, x, x, return_weights=True).weights.dimensions
    (batch, query, key)
    """

    leading: tuple[DimensionName, ...]
    """The name of each dimension before queries and keys."""
    why: str = ""
    """Why a name is unknown, and the missing evidence; empty if none is."""
    queries: Sort = "positions"
    keys: Sort = "positions"

    @classmethod
    def of_call(cls, batch: int, *, has_heads: bool) -> "Dimensions":
        """Those of a call by its documentation, (batch..., H, T, S) or (batch..., T, S)."""
        return cls((*BATCH * batch, "head") if has_heads else BATCH * batch)

    @classmethod
    def unknown(cls, count: int, why: str) -> "Dimensions":
        return cls(UNKNOWN * count, why)

    @property
    def rank(self) -> int:
        return len(self.leading)

    @property
    def head(self) -> int | None:
        """The place of the heads among the dimensions before queries and keys; None without heads."""
        return self.leading.index("head") if "head" in self.leading else None

    @property
    def has_heads_last(self) -> bool:
        return self.leading[-1:] == ("head",)

    def require_heads(self, asked: str, shape: Sequence[int]) -> None:
        if "head" not in self.leading and "unknown" in self.leading:
            raise ShapeError(f"{asked} needs to know the heads of a map {tuple(shape)} {self}: {self.why}")

    def named(self, leading: tuple[DimensionName, ...]) -> "Dimensions":
        return replace(self, leading=leading)

    def without(self, place: int) -> "Dimensions":
        return self.named((*self.leading[:place], *self.leading[place + 1 :]))

    def moved_last(self, place: int) -> "Dimensions":
        return self.named((*self.without(place).leading, self.leading[place]))

    def transposed(self) -> "Dimensions":
        return replace(self, queries=self.keys, keys=self.queries)

    def __str__(self) -> str:
        sorts = (("query", self.queries), ("key", self.keys))
        last = [name if sort == "positions" else f"{name}: {sort}" for name, sort in sorts]
        return f"({', '.join([*self.leading, *last])})"

    __repr__ = __str__


def canonical(
    query: Tensor, key: Tensor, value: Tensor, *, state: State | None = None
) -> tuple[Tensor, Tensor, Tensor, Sizes]:
    """Check query, key and value against each other and give them four dimensions.

    Returns query `(B, H, T, Dq)`, key `(B, G, S, Dk)`, value `(B, G, S, E)` and their `Sizes`. Batch
    dimensions broadcast, as views. The score decides whether Dq must equal Dk.

    >>> q, k, v, sizes = canonical(torch.ones(5, 4), torch.ones(7, 4), torch.ones(7, 3))
    >>> q.shape, sizes.map_shape
    (torch.Size([1, 1, 5, 4]), (5, 7))
    """
    state = run_state(query) if state is None else state
    _check_kinds(query, key, value)
    shapes = query.shape, key.shape, value.shape
    # In a graph or a trace, lengths may be symbols or tensors: do not cache them.
    sizes = _cached_sizes(*shapes) if state.runs_eagerly else sizes_from_shapes(*shapes)
    if sizes.has_heads and len(sizes.batch) == 1 and query.shape[0] == key.shape[0] == value.shape[0]:
        return query, key, value, sizes
    return _flatten(query, sizes), _flatten(key, sizes), _flatten(value, sizes), sizes


def sizes_from_shapes(query: Dims, key: Dims, value: Dims) -> Sizes:
    rank = len(query)
    if not len(key) == len(value) == rank or rank < 2:
        raise ShapeError(
            "query, key and value must share one rank: (batch..., heads, length, dim), (batch, length, dim) "
            f"or (length, dim); got {_named(query, key, value)}"
        )
    has_heads = rank >= 4
    lead = -3 if has_heads else -2
    sizes = Sizes(
        batch=_common_batch(query, key, value, lead),
        heads=query[-3] if has_heads else 1,
        kv_heads=key[-3] if has_heads else 1,
        queries=query[-2],
        keys=key[-2],
        has_heads=has_heads,
    )
    if key[-2] != value[-2]:
        raise ShapeError(f"key and value must have the same length, got {_named(query, key, value)}")
    if has_heads and key[-3] != value[-3]:
        raise ShapeError(f"key and value must have the same number of heads, got {_named(query, key, value)}")
    if 0 in query[lead:] or 0 in key[lead:] or 0 in value[lead:]:
        raise ShapeError(
            f"heads, lengths and dims must be at least 1, got {_named(query, key, value)}: "
            "drop the empty sequences from the batch, or mask them with lengths()"
        )
    if sizes.heads % sizes.kv_heads:
        raise ShapeError(
            f"the query's heads must be a multiple of the key's heads, got {sizes.heads} and {sizes.kv_heads}"
        )
    return sizes


_cached_sizes = lru_cache(maxsize=512)(sizes_from_shapes)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype, as in F.scaled_dot_product_attention."""
    # A later check names an argument of another type.
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not is_autocasting(kind):
        return tensors
    return tuple(t.to(autocast_dtype(t.dtype, kind)) if isinstance(t, Tensor) else t for t in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast on this device: a map's numbers are the same wherever it is read."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if is_autocasting(kind) else nullcontext()


def restore(output: Tensor, sizes: Sizes) -> Tensor:
    """Give a canonical `(B, H, T, E)` output the caller's leading dimensions."""
    return output.reshape(*sizes.leading, *output.shape[-2:])


def canonical_pairwise(tensor: Tensor, sizes: Sizes, name: str) -> Tensor:
    """Canonical rank of 4, each dimension full or 1, of a tensor of the input's rank, or of a 2-D one `(T, S)`."""
    require_dense(tensor, name)
    full = sizes.map_shape
    fits = tensor.dim() == len(full) and all(n in (1, m) for n, m in zip(tensor.shape, full, strict=True))
    plain = tensor.dim() == 2 and all(n in (1, m) for n, m in zip(tensor.shape, full[-2:], strict=True))
    if not (fits or plain):
        raise ShapeError(
            f"{name} must have the rank of the input with each dimension full or 1, here {full}, "
            f"or be 2-D {full[-2:]}; got {tuple(tensor.shape)}{_meant(tuple(tensor.shape), sizes, name)}"
        )
    if not fits:
        return tensor[None, None]
    lead = tensor.shape[: len(sizes.batch)]
    if all(n == 1 for n in lead):
        tensor = tensor.reshape(1, *tensor.shape[len(lead) :])
    else:
        tensor = tensor.expand(*sizes.batch, *tensor.shape[len(lead) :]).flatten(0, len(lead) - 1)
    return tensor if sizes.has_heads else tensor.unsqueeze(1)


def _meant(shape: tuple[int, ...], sizes: Sizes, name: str) -> str:
    """The convention of another library for this shape, as an advice; empty for other shapes."""
    if name == "mask" and shape == (*sizes.batch, sizes.keys):
        return ": the keys of each sequence that may be attended go in as regard.padding(mask)"
    if sizes.has_heads and shape == (*sizes.batch, sizes.queries, sizes.keys):
        return f": for all heads alike it is {name}[..., None, :, :]"
    if sizes.has_heads and shape == (sizes.flat_batch * sizes.heads, sizes.queries, sizes.keys):
        return f": with sequences and heads apart it is {name}.unflatten(0, {(*sizes.batch, sizes.heads)})"
    return ""


def canonical_per_sequence(tensor: Tensor, sizes: Sizes, *trailing: int, name: str) -> Tensor:
    """Flatten the batch dimensions of a tensor of shape `(batch..., *trailing)` to `(B or 1, *trailing)`."""
    require_dense(tensor, name)
    expected = (*sizes.batch, *trailing)
    if len(sizes.batch) == 1 and tensor.shape == expected:
        return tensor
    if tensor.dim() != len(expected) or any(n not in (1, m) for n, m in zip(tensor.shape, expected, strict=True)):
        raise ShapeError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")
    return tensor.expand(expected).reshape(sizes.flat_batch, *trailing)


def take_pairs(tensor: Tensor, rows: Rows, columns: Rows) -> Tensor:
    """A block of a (B or 1, H or 1, T or 1, S or 1) tensor; dimensions of size 1 are left as they are."""
    if tensor.shape[-2] > 1:
        tensor = take(tensor, rows)
    if tensor.shape[-1] > 1:
        tensor = take(tensor.mT, columns).mT
    return tensor


def take(tensor: Tensor, rows: Rows) -> Tensor:
    """Rows of the second-to-last dimension: a view for a range, a copy for an index tensor."""
    if isinstance(rows, range):
        return tensor if len(rows) == tensor.shape[-2] else tensor[..., rows.start : rows.stop, :]
    return tensor.index_select(-2, rows)


def take_rows(tensor: Tensor, rows: Rows) -> Tensor:
    if not isinstance(rows, range):
        return tensor[..., rows]
    return tensor if len(rows) == tensor.shape[-1] else tensor[..., rows.start : rows.stop]


def repeated(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values (B, G, S, D) with a head for each query head, (B, H, S, D): itself for G = H."""
    group = heads // max(tensor.shape[1], 1)
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)


def _common_batch(query: Dims, key: Dims, value: Dims, lead: int) -> tuple[int, ...]:
    batches = query[:lead], key[:lead], value[:lead]
    # They are nearly always equal, and torch.broadcast_shapes takes as long as all the other checks.
    if batches[0] == batches[1] == batches[2]:
        return tuple(batches[0])
    try:
        return tuple(torch.broadcast_shapes(*batches))
    except RuntimeError as error:
        raise ShapeError(
            f"the batch dimensions of query, key and value must be equal or 1, got {_named(query, key, value)}"
        ) from error


def _flatten(tensor: Tensor, sizes: Sizes) -> Tensor:
    if not sizes.has_heads:
        tensor = tensor.unsqueeze(-3)
    if len(sizes.batch) == 1 and tensor.shape[0] == sizes.batch[0]:
        return tensor
    tail = tensor.shape[-3:]
    return tensor.expand(*sizes.batch, *tail).reshape(sizes.flat_batch, *tail)


def _named(query: Dims, key: Dims, value: Dims) -> str:
    return f"query {tuple(query)}, key {tuple(key)}, value {tuple(value)}"


def require_dense(tensor: Tensor, name: str) -> None:
    """Refuse nested and sparse tensors."""
    if tensor.is_nested:
        how = "pad it (torch.nested.to_padded_tensor) and mask by regard.lengths, or put it in one row by regard.pack"
        raise ShapeError(f"{name} must not be nested: {how}")
    if tensor.layout != torch.strided:
        raise ShapeError(f"{name} must be dense, got a tensor of layout {tensor.layout}: use to_dense()")


def _check_kinds(query: Tensor, key: Tensor, value: Tensor) -> None:
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ShapeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.is_nested or tensor.layout != torch.strided:
            require_dense(tensor, name)
        if not tensor.is_floating_point():
            raise ShapeError(f"{name} must be of a floating-point dtype, got {tensor.dtype}: embed or cast it")
    if not query.dtype == key.dtype == value.dtype:
        kinds = ", ".join(f"{name} {t.dtype}" for name, t in tensors.items())
        raise ShapeError(f"query, key and value must share one dtype, got {kinds}")
    if not query.device == key.device == value.device:
        devices = ", ".join(f"{name} {t.device}" for name, t in tensors.items())
        raise ShapeError(f"query, key and value must be on one device, got {devices}")


MOST_COPIED = 1 << 20
"""The most elements of a mask that is copied or rendered for a call, whose backward pass and map read it again."""


def counted(numbers: Tensor, device: torch.device | None = None) -> Tensor:
    """Lengths, ids or positions as a call's own int64 tensor: narrow integers would wrap, and the caller may write on.

    >>> counted(torch.tensor([200], dtype=torch.uint8)) + 100
    tensor([300])
    """
    dtype = numbers.dtype if numbers.is_floating_point() else torch.int64
    return numbers.to(numbers.device if device is None else device, dtype, copy=not is_compiling())


def owned(flags: Tensor, device: torch.device) -> Tensor:
    """The flags of a mask on a device: a copy, unless they are many."""
    return flags.to(device, copy=flags.numel() <= MOST_COPIED and not is_compiling())


def index_tensor(where: Rows, device: torch.device) -> Tensor:
    """Positions as a tensor of indices.

    >>> index_tensor(range(2, 5), torch.device("cpu"))
    tensor([2, 3, 4])
    """
    return torch.arange(where.start, where.stop, device=device) if isinstance(where, range) else where
