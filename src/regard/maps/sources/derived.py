"""Sources made from another source: averages, choices of rows and columns, other dtypes, and weights times values."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from regard.call.shapes import Dimensions, Rows, take_rows
from regard.errors import ArgumentError, ShapeError
from regard.maps.sources.source import Part, PartOf, Piece, Scratch, Source, Statistic
from regard.maps.statistics import definitions as st
from regard.maps.statistics.pooling import Grid
from regard.tensors.fresh import Fresh
from regard.tensors.guards import has_values


class DerivedSource(Source):
    of: Source

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    @property
    def answer_dtype(self) -> torch.dtype:
        return self.of.answer_dtype

    @property
    def device(self) -> torch.device:
        return self.of.device

    @property
    def has_signs(self) -> bool:
        return self.of.has_signs

    @property
    def dimensions(self) -> Dimensions:
        return self.of.dimensions

    @property
    def part_of(self) -> PartOf:
        return self.of.part_of

    @property
    def key_heads(self) -> Tensor | None:
        return self.of.key_heads

    @property
    def has_blocks(self) -> bool:
        return self.of.has_blocks

    @property
    def shape(self) -> torch.Size:
        return self.of.shape

    @property
    def width(self) -> int:
        return self.of.width

    def columns(self, rows: range) -> range:
        return self.of.columns(rows)

    def tensors(self) -> list[Tensor]:
        return list(self.of.tensors())

    def refuse(self, asked: str) -> NoReturn:
        if not self.of.has_blocks:
            self.of.refuse(asked)
        super().refuse(asked)

    def choose(self, flat_heads: Tensor | None, leading: tuple[int, ...]) -> Source:
        return self._of_other(self.of.choose(flat_heads, leading))

    def with_dimensions(self, dimensions: Dimensions) -> Source:
        return self._of_other(self.of.with_dimensions(dimensions))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Source:
        return self._of_other(self.of.mapped(change))

    def _of_other(self, source: Source) -> Source:
        derived: Any = self
        made: Source = replace(derived, of=source)
        return made


@dataclass(frozen=True, eq=False)
class AverageSource(DerivedSource):
    of: Source
    shares: Tensor | None = None
    """The factors: for a mean they sum to 1."""

    @property
    def key_heads(self) -> None:
        return None

    @property
    def count(self) -> int:
        return self.of.leading[-1]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.of.leading[:-1], *self.of.shape[-2:]))

    @property
    def dimensions(self) -> Dimensions:
        return self.of.dimensions.without(self.of.dimensions.rank - 1)

    def with_dimensions(self, dimensions: Dimensions) -> "AverageSource":
        whole = dimensions.named((*dimensions.leading, self.of.dimensions.leading[-1]))
        return replace(self, of=self.of.with_dimensions(whole))

    @property
    def width(self) -> int:
        return self.of.width * self.count

    @property
    def has_signs(self) -> bool:
        shares = self.shares
        return self.of.has_signs or (shares is not None and has_values(shares) and bool((shares.detach() < 0).any()))

    def tensors(self) -> list[Tensor]:
        return [*self.of.tensors(), *(() if self.shares is None else (self.shares,))]

    def columns(self, rows: range) -> range:
        return range(self.keys) if self.has_signs else self.of.columns(rows)

    def __str__(self) -> str:
        kind = "mean" if self.shares is None else "weighted sum"
        return f"the {kind} over {self.count} of a map {tuple(self.of.shape)}: {self.of}"

    def grid(self, wanted: Grid, how: str) -> Grid:
        return self.of.grid(wanted, how)

    def at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        match statistic:
            case st.Product(x) | st.TransposedProduct(x) if len(x) > 1:
                statistic = replace(statistic, x=x.repeat_interleave(self.count, 0))
            case st.Pooled() if statistic.of_largest:
                return None
            case st.Product() | st.TransposedProduct() | st.Received() | st.Distance() | st.Pooled():
                pass
            case _:
                return None
        found = self.of.at_once(statistic)
        return None if found is None else (self._as_one(found[0]),)

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        inner = self.of.part(range(flat_heads.start * self.count, flat_heads.stop * self.count), scratch)
        return lambda rows, columns: Piece(self._as_one(inner(rows, columns).weights))

    def _as_one(self, answer: Tensor) -> Tensor:
        answer = answer.unflatten(0, (-1, self.count))
        return answer.mean(1) if self.shares is None else torch.einsum("cn...,n->c...", answer, self.shares)

    def choose(self, flat_heads: Tensor | None, leading: tuple[int, ...]) -> "AverageSource":
        if flat_heads is not None:
            flat_heads = (
                flat_heads[:, None] * self.count + torch.arange(self.count, device=flat_heads.device)
            ).reshape(-1)
        return replace(self, of=self.of.choose(flat_heads, (*leading, self.count)))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "AverageSource":
        return AverageSource(self.of.mapped(change), None if self.shares is None else change(self.shares))


@dataclass(frozen=True, eq=False)
class WeightedSource(DerivedSource):
    of: Source
    left: Tensor | None
    """a (flat_heads, T, E); None for 1."""
    right: Tensor
    name: str
    alone: bool = False
    fresh: Fresh = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fresh", Fresh(gradient_of_the_output=self.left, values=self.right))

    @property
    def width(self) -> int:
        return 1 if self.alone else self.of.width

    @property
    def has_signs(self) -> bool:
        return self.left is not None

    def tensors(self) -> list[Tensor]:
        return [*self.of.tensors(), self.right, *(() if self.left is None else (self.left,))]

    def __str__(self) -> str:
        return f"{self.name} of a map {tuple(self.of.shape)}: {self.of}"

    def columns(self, rows: range) -> range:
        return range(self.keys) if self.alone or self.has_signs else self.of.columns(rows)

    def support(self, rows: range) -> range:
        return range(self.keys) if self.alone else self.of.support(rows)

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        self.fresh.check()
        where = slice(flat_heads.start, flat_heads.stop)
        inner = None if self.alone else self.of.part(flat_heads, scratch)
        right = self.right[where]
        left = None if self.left is None else self.left[where]

        def weights(rows: Rows, columns: Rows) -> Piece:
            factor = take_rows(right.mT, columns)
            if left is not None:
                factor = take_rows(left.mT, rows).mT @ factor
            return Piece(factor if inner is None else inner(rows, columns).weights * factor)

        return weights

    def choose(self, flat_heads: Tensor | None, leading: tuple[int, ...]) -> "WeightedSource":
        self.fresh.check()
        left, right = ((t if t is None or flat_heads is None else t[flat_heads]) for t in (self.left, self.right))
        assert right is not None
        return replace(self, of=self.of.choose(flat_heads, leading), left=left, right=right)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "WeightedSource":
        self.fresh.check()
        left = None if self.left is None else change(self.left)
        return replace(self, of=self.of.mapped(change), left=left, right=change(self.right))


@dataclass(frozen=True, eq=False)
class PositiveSource(DerivedSource):
    of: Source

    @property
    def has_signs(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"the positive part of {self.of}"

    def columns(self, rows: range) -> range:
        return self.of.support(rows)

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        inner = self.of.part(flat_heads, scratch)
        return lambda rows, columns: Piece(inner(rows, columns).weights.clamp_min(0.0))


@dataclass(frozen=True, eq=False)
class SizeSource(PositiveSource):
    def __str__(self) -> str:
        return f"the sizes of {self.of}"

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        inner = self.of.part(flat_heads, scratch)
        return lambda rows, columns: Piece(inner(rows, columns).weights.abs())


def mean_of_positive(source: Source, grad_output: Tensor | None) -> Source:
    positive = PositiveSource(source.gradient(grad_output, "attribution"))
    source.require_heads("relevance()")
    return positive if source.dimensions.head is None else average(positive)


def sum_over(of: Source, dim: int) -> AverageSource:
    place = _leading_place(of, dim)
    return _over(of, place, torch.ones(of.leading[place], dtype=of.dtype, device=of.device))


def average(of: Source, dim: int | None = None, weights: Tensor | Sequence[float] | None = None) -> AverageSource:
    place = _head_place(of) if dim is None else _leading_place(of, dim)
    shares = None
    if weights is not None:
        shares, count = torch.as_tensor(weights, dtype=of.dtype, device=of.device), of.leading[place]
        if shares.shape != (count,):
            raise ArgumentError(f"average() needs one weight for each of {count}, got {tuple(shares.shape)}")
        whole = shares.sum()
        if has_values(whole) and not (bool(whole.isfinite()) and bool(whole)):
            raise ArgumentError(f"average() divides its weights by their sum, which is {float(whole)}")
        shares = shares / whole
    return _over(of, place, shares)


def mean_of_key_heads(of: Source) -> Source:
    key_heads, names = of.key_heads, of.dimensions
    if key_heads is None:
        of.refuse("per_key_head()")
    of.require_heads("per_key_head()")
    if names.head is None:
        return of
    if not key_heads.numel():
        return of
    by_sequence = key_heads.view(of.leading).movedim(names.head, -1).reshape(-1, of.leading[names.head])
    groups: dict[int, list[int]] = {}
    for place, group in enumerate(by_sequence[0].tolist()):
        groups.setdefault(group, []).append(place)
    if all(len(group) == 1 for group in groups.values()):
        return of
    # Heads of groups of unlike sizes are repeated until all have as many: the means are the same.
    count = math.lcm(*map(len, groups.values()))
    order = [[place for place in group for _ in range(count // len(group))] for group in groups.values()]
    moved = heads_last(of)
    is_whole = order == [[*range(n * count, (n + 1) * count)] for n in range(len(order))]
    places = torch.arange(moved.flat_heads, device=of.device).view(moved.leading)
    leading = (*moved.leading[:-1], len(order), count)
    chosen = None if is_whole else places[..., torch.tensor(order, device=of.device)].reshape(-1)
    grouped, names = moved.choose(chosen, leading), moved.dimensions
    return average(grouped.with_dimensions(names.named((*names.leading, "head"))), -3)


def heads_last(of: Source) -> Source:
    names = of.dimensions
    of.require_heads("with_heads()")
    if names.head is None:
        return of.choose(None, (*of.leading, 1)).with_dimensions(names.named((*names.leading, "head")))
    return of if names.has_heads_last else _moved_last(of, names.head)


def _moved_last(of: Source, place: int) -> Source:
    flat_heads = torch.arange(math.prod(of.leading), device=of.device).view(of.leading).movedim(place, -1)
    moved = of.choose(flat_heads.reshape(-1), tuple(flat_heads.shape))
    return moved.with_dimensions(of.dimensions.moved_last(place))


def _head_place(of: Source) -> int:
    of.require_heads("average()")
    if of.dimensions.head is None:
        raise ShapeError(
            f"average() is a mean over heads, and a map {tuple(of.shape)} {of.dimensions} has no dimension of heads: "
            "average(dim) averages over another, and with_heads() adds one to a map that is of one head"
        )
    return of.dimensions.head


def _leading_place(of: Source, dim: int) -> int:
    place = dim + len(of.shape) if dim < 0 else dim
    if not 0 <= place < len(of.leading):
        raise ArgumentError(
            f"a map {tuple(of.shape)} can be averaged over the dimensions before queries and keys, got dim {dim}"
        )
    return place


def _over(of: Source, place: int, shares: Tensor | None) -> AverageSource:
    return AverageSource(of if place == len(of.leading) - 1 else _moved_last(of, place), shares)


@dataclass(frozen=True, eq=False)
class CastSource(DerivedSource):
    of: Source
    answer: torch.dtype

    @classmethod
    def of_dtype(cls, source: Source, dtype: torch.dtype) -> Source:
        inner = source.of if isinstance(source, CastSource) else source
        return inner if dtype == inner.answer_dtype else cls(inner, dtype)

    @property
    def answer_dtype(self) -> torch.dtype:
        return self.answer

    def __str__(self) -> str:
        return f"{self.of}, as {str(self.answer).removeprefix('torch.')}"

    def grid(self, wanted: Grid, how: str) -> Grid:
        return self.of.grid(wanted, how)

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        return self.of.part(flat_heads, scratch)

    def at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        return self.of.at_once(statistic)

    def gradient(self, grad_output: Tensor | None, asked: str) -> Source:
        return CastSource(self.of.gradient(grad_output, asked), self.answer)
