"""Masks of query-key pairs: everywhere, True = keep.

A mask is a predicate on absolute positions, `allowed(batch, head, query, key)`. Every rendering (a dense tensor, a
tile, a range of keys, a drawing) calls the same predicate, so renderings agree. Masks combine with `&`, `|` and `~`,
also with bool tensors.

    lengths(n)             key < n                      one length per sequence
    lengths(n, per_query)  key < n[query]               one length per query (d2l's 2-D valid_lens)
    padding(keep)          keep[key]                    from a bool tensor, or from tokens and a pad id
    causal()               key <= query + S - T         the last query sees the last key
    causal(offset)         key <= query + offset        query i stands at position offset + i
    predicate(function)    function(batch, head, query, key)
    a bool tensor          tensor[..., query, key]

and, in `regard.call.masks.patterns`, windows, prefixes, packed documents, strides and blocks.

A mask is built without the sizes of a call. `bind` resolves it against them (causal's default offset, the shape of
lengths) and checks it there.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.call.shapes import Rows, Sizes, canonical_pairwise, index_tensor, owned, take_pairs
from regard.errors import ArgumentError, RegardError
from regard.lazy import Displayed
from regard.tensors.tile_sizes import union

AXES = frozenset({"batch", "head", "query", "key"})


class Mask(Displayed, ABC):
    """A predicate on positions. Subclasses define `allowed`, and declare their structure."""

    @abstractmethod
    def allowed(
        self,
        batch: Int[Tensor, "..."],
        head: Int[Tensor, "..."],
        query: Int[Tensor, "..."],
        key: Int[Tensor, "..."],
    ) -> Bool[Tensor, "..."]:
        """True where the query may attend to the key, for index tensors that broadcast together.

        The result has only the dimensions it depends on: for a mask on keys alone the shape of `key` (and batch),
        whatever the number of queries.
        """

    def depends_on(self) -> frozenset[str]:
        """The arguments (batch, head, query, key) read by the predicate; by default all."""
        return AXES

    def key_range(self, rows: range, sizes: Sizes) -> range:
        """The range of keys outside which no query of `rows` may attend; by default all keys."""
        return range(sizes.keys)

    def row_cuts(self, sizes: Sizes) -> list[int]:
        """Rows at which a block of queries should begin, because the allowed keys change there."""
        return []

    def covers(self, rows: range, columns: range) -> bool:
        """Whether every query of `rows` may attend to every key of `columns`; False if a cheap check cannot tell."""
        return False

    def is_relative(self) -> bool:
        """Whether the predicate depends on key - query alone: then all blocks on a diagonal are equal."""
        return False

    def block(self, rows: Rows, columns: Rows, *, sizes: Sizes, device: torch.device) -> Bool[Tensor, "..."]:
        """The block of a bound mask for some rows and columns: (B or 1, H or 1, t or 1, s or 1)."""
        axes = self.depends_on()
        # An axis without influence on the mask needs one position only.
        batch = torch.arange(sizes.flat_batch if "batch" in axes else 1, device=device)[:, None, None, None]
        head = torch.arange(sizes.heads if "head" in axes else 1, device=device)[:, None, None]
        allowed = self.allowed(batch, head, index_tensor(rows, device)[:, None], index_tensor(columns, device))
        return allowed[(None,) * (4 - allowed.dim())]

    def bind(self, sizes: Sizes, device: torch.device) -> "Mask":
        """Resolve the mask against a call: definite offsets, a flat batch, tensors on the call's device."""
        return self

    def fewest_first_keys(self) -> int | None:
        """The smallest n of a mask that lets each query see its first n keys and no others; None if it is unknown."""
        return None

    def factors(self) -> tuple["Mask", ...]:
        """The masks of a conjunction; else the mask itself."""
        return (self,)

    def dense(self, sizes: Sizes, device: torch.device | str = "cpu") -> Bool[Tensor, "..."]:
        """The mask as one bool tensor of shape (B or 1, H or 1, T or 1, S or 1).

        Raises:
            ArgumentError: `sizes` are numbers, which `to_tensor` takes.
        """
        if not isinstance(sizes, Sizes):
            raise ArgumentError(
                f"dense() takes the sizes of a call, got {sizes!r}: to_tensor(queries, keys) takes numbers"
            )
        device = torch.device(device)
        rows, columns = range(sizes.queries), range(sizes.keys)
        return self.bind(sizes, device).block(rows, columns, sizes=sizes, device=device)

    def to_tensor(
        self, queries: int, keys: int | None = None, *, batch: int | None = None, heads: int | None = None
    ) -> Bool[Tensor, "..."]:
        """The mask as a bool tensor, True = keep.

        Args:
            queries: T.
            keys: S; T unless given.
            batch: the number of sequences, for a mask that differs between them.
            heads: the number of heads, for a mask that differs between them.

        Returns:
            (T, S), after the dimensions of the batch and of the heads where they are given.

        Raises:
            ShapeError: the mask does not fit these sizes.

        >>> from regard.call.masks import lengths
        >>> lengths(torch.tensor([1, 2])).to_tensor(1, 3, batch=2)
        tensor([[[ True, False, False]],
        <BLANKLINE>
                [[ True,  True, False]]])
        """
        kv_heads = 1 if heads is None else heads
        sizes = Sizes(
            () if batch is None else (batch,),
            kv_heads,
            kv_heads,
            queries,
            queries if keys is None else keys,
            heads is not None,
        )
        return (
            self.dense(sizes).expand(sizes.flat_batch, sizes.heads, sizes.queries, sizes.keys).reshape(sizes.map_shape)
        )

    def draw(self, queries: int = 12, keys: int | None = None) -> str:
        """The mask in characters, queries down and keys across, for one sequence and one head.

        >>> from regard.call.masks import causal
        >>> print(causal().draw(3))
        #..
        ##.
        ###
        """
        rows = self.to_tensor(queries, keys).tolist()
        return "\n".join("".join("#" if allowed else "." for allowed in row) for row in rows)

    def __repr__(self) -> str:
        try:
            return f"{self}\n{self.draw()}"
        except (RegardError, IndexError, RuntimeError):
            return str(self)

    def __and__(self, other: "Mask | Tensor") -> "Mask":
        mask = _operand(other)
        return NotImplemented if mask is None else And((*self.factors(), *mask.factors()))

    def __or__(self, other: "Mask | Tensor") -> "Mask":
        mask = _operand(other)
        return NotImplemented if mask is None else Or((self, mask))

    __rand__, __ror__ = __and__, __or__

    def __bool__(self) -> bool:
        """Refuse: `and`, `or` and `not` of Python would drop a mask silently."""
        raise ArgumentError(
            f"a mask ({self}) is neither true nor false: combine masks with &, | and ~, and not with and, or and not; "
            "compare with `is None` to see whether there is one"
        )

    def __invert__(self) -> "Mask":
        return Not(self)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DenseMask(Mask):
    """A bool tensor given by the caller, True = keep: the input's rank with each dimension full or 1, or (T, S)."""

    tensor: Tensor

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        return DenseMask(canonical_pairwise(owned(self.tensor, device), sizes, "mask"))

    def block(self, rows: Rows, columns: Rows, *, sizes: Sizes, device: torch.device) -> Tensor:
        if self.tensor.dim() != 4:
            return Mask.block(self, rows, columns, sizes=sizes, device=device)
        return take_pairs(self.tensor, rows, columns)

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        index = (batch, head, query, key)
        zero = torch.zeros_like(batch)
        return self.tensor[tuple(zero if n == 1 else i for i, n in zip(index, self.tensor.shape, strict=True))]

    def depends_on(self) -> frozenset[str]:
        axes = ("batch", "head", "query", "key")
        if self.tensor.dim() != 4:
            return AXES
        return frozenset(axis for axis, n in zip(axes, self.tensor.shape, strict=True) if n != 1)

    def __str__(self) -> str:
        return "a dense mask"


def _operand(given: object) -> Mask | None:
    if isinstance(given, Tensor) and given.dtype == torch.bool:
        return DenseMask(given)
    return given if isinstance(given, Mask) else None


@dataclass(frozen=True, slots=True, repr=False)
class _Combination(Mask):
    masks: tuple[Mask, ...]

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        bound = []  # (A loop, as each call comes here: a generator is entered once for each mask.)
        for mask in self.masks:
            bound.append(mask.bind(sizes, device))
        return type(self)(tuple(bound))

    def depends_on(self) -> frozenset[str]:
        found: frozenset[str] = frozenset()  # (torch.compile traces no call of a generic alias.)
        for mask in self.masks:
            found |= mask.depends_on()
        return found

    def row_cuts(self, sizes: Sizes) -> list[int]:
        return sorted({cut for mask in self.masks for cut in mask.row_cuts(sizes)})

    def is_relative(self) -> bool:
        return all(mask.is_relative() for mask in self.masks)


@dataclass(frozen=True, slots=True, repr=False)
class And(_Combination):
    def factors(self) -> tuple[Mask, ...]:
        return self.masks

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        answer = self.masks[0].allowed(batch, head, query, key)
        for mask in self.masks[1:]:
            answer = answer & mask.allowed(batch, head, query, key)
        return answer

    def key_range(self, rows: range, sizes: Sizes) -> range:
        ranges = [mask.key_range(rows, sizes) for mask in self.masks]
        start = max(r.start for r in ranges)
        return range(start, max(start, min(r.stop for r in ranges)))

    def covers(self, rows: range, columns: range) -> bool:
        return all(mask.covers(rows, columns) for mask in self.masks)

    def __str__(self) -> str:
        return " & ".join(f"({mask})" if isinstance(mask, Or) else str(mask) for mask in self.masks)


def all_of(*masks: Mask | None) -> Mask | None:
    factors = [factor for mask in masks if mask is not None for factor in mask.factors()]
    return None if not factors else factors[0] if len(factors) == 1 else And(tuple(factors))


@dataclass(frozen=True, slots=True, repr=False)
class Or(_Combination):
    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        answer = self.masks[0].allowed(batch, head, query, key)
        for mask in self.masks[1:]:
            answer = answer | mask.allowed(batch, head, query, key)
        return answer

    def key_range(self, rows: range, sizes: Sizes) -> range:
        return union(mask.key_range(rows, sizes) for mask in self.masks)

    def covers(self, rows: range, columns: range) -> bool:
        return any(mask.covers(rows, columns) for mask in self.masks)

    def __str__(self) -> str:
        return " | ".join(str(mask) for mask in self.masks)


@dataclass(frozen=True, slots=True, repr=False)
class Not(Mask):
    """The pairs forbidden by the mask. Their range of keys is unknown, so no block is skipped."""

    mask: Mask

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        return Not(self.mask.bind(sizes, device))

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ~self.mask.allowed(batch, head, query, key)

    def depends_on(self) -> frozenset[str]:
        return self.mask.depends_on()

    def is_relative(self) -> bool:
        return self.mask.is_relative()

    def __str__(self) -> str:
        return f"~({self.mask})"
