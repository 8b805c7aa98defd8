"""The names of a map's dimensions: what its rows, its columns and the dimensions before them count."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from regard.errors import ShapeError
from regard.maps.indexing import is_integer

Name = Literal["batch", "window", "head", "unknown"]
"""What a dimension before queries and keys counts: sequences, parts of a sequence, or heads."""
Sort = Literal["positions", "patches", "layers", "slots", "unknown"]
"""What queries or keys are: positions of a sequence, patches of an image, outputs of layers, or learned vectors."""

BATCH: tuple[Name, ...] = ("batch",)
UNKNOWN: tuple[Name, ...] = ("unknown",)

UNNAMED = "an index or a function moved its dimensions: choose or average before it"
SEVERAL = "several index tensors moved its dimensions: choose by one at a time"


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The names of a map's dimensions, (leading..., queries, keys).

    The source of a map gives them, from evidence: the documentation of the call, the sizes that a module tells, the
    channels of a projection. Without evidence a name is "unknown", and `why` says what would tell.

    >>> import regard, torch
    >>> x = torch.eye(3).expand(2, 3, 3)
    >>> regard.attention(x, x, x, return_weights=True).weights.dimensions
    (batch, query, key)
    """

    leading: tuple[Name, ...]
    """The name of each dimension before queries and keys."""
    why: str = ""
    """Why a name is unknown, and what would tell; empty if none is."""
    queries: Sort = "positions"
    keys: Sort = "positions"

    @classmethod
    def of_call(cls, batch: int, *, has_heads: bool) -> "Dimensions":
        """Those of a call by its documentation, (batch..., H, T, S) or (batch..., T, S)."""
        return cls((*BATCH * batch, "head") if has_heads else BATCH * batch)

    @classmethod
    def unknown(cls, count: int, why: str) -> "Dimensions":
        """`count` dimensions without a name."""
        return cls(UNKNOWN * count, why)

    @property
    def rank(self) -> int:
        """How many dimensions are before queries and keys."""
        return len(self.leading)

    @property
    def head(self) -> int | None:
        """The place of the heads among the dimensions before queries and keys; None without heads."""
        return self.leading.index("head") if "head" in self.leading else None

    @property
    def has_heads_last(self) -> bool:
        """Whether the heads are the dimension before the queries."""
        return self.leading[-1:] == ("head",)

    def require_heads(self, asked: str, shape: Sequence[int]) -> None:
        """Check that it is known which dimension has the heads, if any has.

        Raises:
            ShapeError: a name is unknown.
        """
        if "head" not in self.leading and "unknown" in self.leading:
            raise ShapeError(f"{asked} needs to know the heads of a map {tuple(shape)} {self}: {self.why}")

    def named(self, leading: tuple[Name, ...]) -> "Dimensions":
        """The same queries and keys under other leading dimensions."""
        return replace(self, leading=leading)

    def without(self, place: int) -> "Dimensions":
        """The same without one leading dimension."""
        return self.named((*self.leading[:place], *self.leading[place + 1 :]))

    def moved_last(self, place: int) -> "Dimensions":
        """The same with one leading dimension after the others."""
        return self.named((*self.without(place).leading, self.leading[place]))

    def transposed(self) -> "Dimensions":
        """Those of the transposed map."""
        return replace(self, queries=self.keys, keys=self.queries)

    def indexed(self, lead: tuple[Any, ...], rank: int) -> "Dimensions":
        """Those of the `rank` dimensions that an index of the leading ones leaves; a new one is a batch of one."""
        names = iter(self.leading)
        found: list[Name] = ["batch" if i is None else next(names, "unknown") for i in lead]
        gone = [n for n, i in enumerate(lead) if is_integer(i)]
        tensors = [n for n, i in enumerate(lead) if n not in gone and i is not None and not isinstance(i, slice)]
        kept = [n for n in range(len(lead)) if n not in gone]
        if tensors and max(gone + tensors) - min(gone + tensors) > len(gone):
            # torch puts the dimension of a tensor first if a slice stands between it and an integer.
            kept.sort(key=lambda n: n not in tensors)
        taken = sum(i is not None for i in lead)
        if len(tensors) > 1 or taken != len(self.leading) or len(kept) != rank:
            return replace(self, leading=UNKNOWN * rank, why=SEVERAL)
        return self.named(tuple(found[n] for n in kept))

    def __str__(self) -> str:
        sorts = (("query", self.queries), ("key", self.keys))
        last = [name if sort == "positions" else f"{name}: {sort}" for name, sort in sorts]
        return f"({', '.join([*self.leading, *last])})"

    __repr__ = __str__
