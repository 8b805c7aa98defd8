"""Sources made of other sources: averages, choices of rows and columns, joined steps, and weights times values."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NoReturn

import torch
from torch import Tensor

from regard.errors import ArgumentError, ShapeError
from regard.maps import statistics as st
from regard.maps.pooling import Grid
from regard.maps.source import Part, Piece, Rows, Scratch, Source, Statistic, take_rows
from regard.maps.tiles import ask


class DerivedSource(Source):
    """A source that is made of one other source, and has its device, its dtype, and what was kept of it."""

    of: Source

    @property
    def dtype(self) -> torch.dtype:
        """The other's."""
        return self.of.dtype

    @property
    def answer_dtype(self) -> torch.dtype:
        """The other's."""
        return self.of.answer_dtype

    @property
    def device(self) -> torch.device:
        """The other's."""
        return self.of.device

    @property
    def has_signs(self) -> bool:
        """The other's."""
        return self.of.has_signs

    @property
    def has_blocks(self) -> bool:
        """The other's."""
        return self.of.has_blocks

    def tensors(self) -> list[Tensor]:
        """The other's."""
        return list(self.of.tensors())

    def refuse(self, asked: str) -> NoReturn:
        """If the other source did not keep its weights, it says what it kept."""
        if not self.of.has_blocks:
            self.of.refuse(asked)
        super().refuse(asked)


@dataclass(frozen=True, eq=False)
class AverageSource(DerivedSource):
    """The mean of a source over its last leading dimension, or a mean with shares that sum to 1."""

    of: Source
    shares: Tensor | None = None

    @property
    def count(self) -> int:
        """How many the mean is over."""
        return self.of.leading[-1]

    @property
    def shape(self) -> torch.Size:
        """Without the dimension that the mean is over."""
        return torch.Size((*self.of.leading[:-1], *self.of.shape[-2:]))

    @property
    def width(self) -> int:
        """All that are averaged are made together."""
        return self.of.width * self.count

    def __str__(self) -> str:
        return f"the mean over {self.count} of a map {tuple(self.of.shape)}: {self.of}"

    def grid(self, wanted: Grid, how: str) -> Grid:
        """The other's."""
        return self.of.grid(wanted, how)

    def columns(self, rows: range) -> range:
        """The same for every head."""
        return self.of.columns(rows)

    def part(self, cells: range, scratch: Scratch | None = None) -> Part:
        """The mean of the cells' groups."""
        inner = self.of.part(range(cells.start * self.count, cells.stop * self.count), scratch)
        return lambda rows, columns: Piece(self._mean(inner(rows, columns).weights))

    def at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        """Sums and products are the means of those of the heads."""
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
        return None if found is None else (self._mean(found[0]),)

    def _mean(self, answer: Tensor) -> Tensor:
        answer = answer.unflatten(0, (-1, self.count))
        return answer.mean(1) if self.shares is None else torch.einsum("cn...,n->c...", answer, self.shares)

    def choose(self, cells: Tensor | None, leading: tuple[int, ...]) -> "AverageSource":
        """The means of the cells' groups."""
        if cells is not None:
            cells = (cells[:, None] * self.count + torch.arange(self.count, device=cells.device)).reshape(-1)
        return replace(self, of=self.of.choose(cells, (*leading, self.count)))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "AverageSource":
        """The other and the shares, changed."""
        return AverageSource(self.of.mapped(change), None if self.shares is None else change(self.shares))


@dataclass(frozen=True, eq=False)
class SelectionSource(DerivedSource):
    """Some queries and keys of a source. The weights are not changed, so that rows may sum to less than 1."""

    of: Source
    rows: Rows
    chosen: Rows
    """Which keys."""

    @property
    def shape(self) -> torch.Size:
        """As many queries and keys as chosen."""
        return torch.Size((*self.of.leading, len(self.rows), len(self.chosen)))

    @property
    def width(self) -> int:
        """The other's."""
        return self.of.width

    def __str__(self) -> str:
        return f"some rows and columns of a map {tuple(self.of.shape)}: {self.of}"

    def columns(self, rows: range) -> range:
        """The columns of the other source, if the chosen rows and columns are neighbours."""
        if not isinstance(self.rows, range) or not isinstance(self.chosen, range):
            return range(self.keys)
        inner = self.of.columns(range(self.rows.start + rows.start, self.rows.start + rows.stop))
        start = max(inner.start, self.chosen.start)
        stop = max(start, min(inner.stop, self.chosen.stop))
        return range(start - self.chosen.start, stop - self.chosen.start)

    def part(self, cells: range, scratch: Scratch | None = None) -> Part:
        """The other source's, asked for the rows and columns meant."""
        inner = self.of.part(cells, scratch)
        return lambda rows, columns: inner(_of(self.rows, rows), _of(self.chosen, columns))

    def choose(self, cells: Tensor | None, leading: tuple[int, ...]) -> "SelectionSource":
        """The same rows and columns of those cells."""
        return replace(self, of=self.of.choose(cells, leading))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "SelectionSource":
        """The other and the indices, changed."""
        rows, chosen = (i if isinstance(i, range) else change(i) for i in (self.rows, self.chosen))
        return SelectionSource(self.of.mapped(change), rows, chosen)


@dataclass(frozen=True, eq=False)
class StackSource(Source):
    """Sources whose rows follow one another; those with fewer keys have zeros at the end."""

    steps: tuple[Source, ...]

    @cached_property
    def ends(self) -> list[int]:
        """The query after the last of each step."""
        return list(accumulate(step.queries for step in self.steps))

    @property
    def shape(self) -> torch.Size:
        """All queries, and the most keys."""
        return torch.Size((*self.steps[0].leading, self.ends[-1], max(step.keys for step in self.steps)))

    @property
    def dtype(self) -> torch.dtype:
        """The steps'."""
        return self.steps[0].dtype

    @property
    def device(self) -> torch.device:
        """The steps'."""
        return self.steps[0].device

    @property
    def width(self) -> int:
        """Of the widest step."""
        return max(step.width for step in self.steps)

    @property
    def has_signs(self) -> bool:
        """Whether one step's weights may be below 0."""
        return any(step.has_signs for step in self.steps)

    @property
    def has_blocks(self) -> bool:
        """Whether all steps have them."""
        return all(step.has_blocks for step in self.steps)

    def tensors(self) -> list[Tensor]:
        """All of the steps'."""
        return [tensor for step in self.steps for tensor in step.tensors()]

    def __str__(self) -> str:
        return f"{len(self.steps)} steps"

    def refuse(self, asked: str) -> NoReturn:
        """The first step that did not keep all says what it kept."""
        for step in self.steps:
            if not step.has_blocks:
                step.refuse(asked)
        super().refuse(asked)

    def columns(self, rows: range) -> range:
        """The range that covers those of the steps. With signs it is all keys: zeros beyond may be the largest."""
        if self.has_signs:
            return range(self.keys)
        ranges = [r for step, inner in self._found(rows) if (r := self.steps[step].columns(inner))]
        return range(min(r.start for r in ranges), max(r.stop for r in ranges)) if ranges else range(0)

    def part(self, cells: range, scratch: Scratch | None = None) -> Part:
        """The weights of the steps, one below the other. No step gets the scratch, because it could overwrite the
        weights of another step before all are joined."""
        parts = [step.part(cells) for step in self.steps]

        def weights(rows: Rows, columns: Rows) -> Piece:
            if not isinstance(rows, range):
                pieces = [weights(range(i, i + 1), columns).weights for i in rows.tolist()]
                return Piece(torch.cat(pieces, dim=1))
            found = [_padded(parts[step], inner, columns, self.steps[step].keys) for step, inner in self._found(rows)]
            return Piece(found[0] if len(found) == 1 else torch.cat(found, dim=1))

        return weights

    def at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        """Entropy, participation and squares of a query are those of its step."""
        if not isinstance(statistic, st.Entropy | st.Participation | st.Squares):
            return None
        found = [ask(step, statistic) for step in self.steps]
        return tuple(torch.cat(answers, dim=1) for answers in zip(*found, strict=True))

    def choose(self, cells: Tensor | None, leading: tuple[int, ...]) -> "StackSource":
        """The same cells of every step."""
        return StackSource(tuple(step.choose(cells, leading) for step in self.steps))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "StackSource":
        """Every step, changed."""
        return StackSource(tuple(step.mapped(change) for step in self.steps))

    def _found(self, rows: range) -> list[tuple[int, range]]:
        """The steps that rows are in, and which of their rows are meant."""
        found, at = [], rows.start
        while at < rows.stop:
            step = bisect_right(self.ends, at)
            begin, stop = self.ends[step] - self.steps[step].queries, min(rows.stop, self.ends[step])
            found.append((step, range(at - begin, stop - begin)))
            at = stop
        return found


@dataclass(frozen=True, eq=False)
class WeightedSource(DerivedSource):
    """The weights of a source times a_i . b_j, or a_i . b_j alone."""

    of: Source
    left: Tensor | None
    """a (cells, T, E); None for 1."""
    right: Tensor
    """b (cells, S, E)."""
    name: str
    alone: bool = False

    @property
    def shape(self) -> torch.Size:
        """The other's."""
        return self.of.shape

    @property
    def width(self) -> int:
        """The other's, if it is asked at all."""
        return 1 if self.alone else self.of.width

    @property
    def has_signs(self) -> bool:
        """Whether the factors may be below 0: norms are not, products may be."""
        return self.left is not None

    def tensors(self) -> list[Tensor]:
        """The other's and its own."""
        return [*self.of.tensors(), self.right, *(() if self.left is None else (self.left,))]

    def __str__(self) -> str:
        return f"{self.name} of a map {tuple(self.of.shape)}: {self.of}"

    def columns(self, rows: range) -> range:
        """All keys if the products have signs, because a 0 that is left out may be the largest."""
        return range(self.keys) if self.alone or self.has_signs else self.of.columns(rows)

    def part(self, cells: range, scratch: Scratch | None = None) -> Part:
        """The product of the two, pair by pair."""
        where = slice(cells.start, cells.stop)
        inner = None if self.alone else self.of.part(cells, scratch)
        right = self.right[where]
        left = None if self.left is None else self.left[where]

        def weights(rows: Rows, columns: Rows) -> Piece:
            factor = take_rows(right.mT, columns)
            if left is not None:
                factor = take_rows(left.mT, rows).mT @ factor
            return Piece(factor if inner is None else inner(rows, columns).weights * factor)

        return weights

    def choose(self, cells: Tensor | None, leading: tuple[int, ...]) -> "WeightedSource":
        """The same of those cells."""
        left, right = ((t if t is None or cells is None else t[cells]) for t in (self.left, self.right))
        assert right is not None
        return replace(self, of=self.of.choose(cells, leading), left=left, right=right)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "WeightedSource":
        """The other and both factors, changed."""
        left = None if self.left is None else change(self.left)
        return replace(self, of=self.of.mapped(change), left=left, right=change(self.right))


def average(of: Source, dim: int, weights: Tensor | Sequence[float] | None) -> AverageSource:
    """The mean over a leading dimension. See `AttentionMap.average`.

    Raises:
        ArgumentError: the dimension is not one of those before queries and keys, or not as many weights.
    """
    leading = of.leading
    place = dim + len(of.shape) if dim < 0 else dim
    if not 0 <= place < len(leading):
        raise ArgumentError(
            f"a map {tuple(of.shape)} can be averaged over the dimensions before queries and keys, got dim {dim}"
        )
    shares = None
    if weights is not None:
        shares = torch.as_tensor(weights, dtype=of.dtype, device=of.device)
        if shares.shape != (leading[place],):
            raise ArgumentError(f"average() needs one weight for each of {leading[place]}, got {tuple(shares.shape)}")
        shares = shares / shares.sum()
    if place == len(leading) - 1:
        return AverageSource(of, shares)
    cells = torch.arange(math.prod(leading), device=of.device).view(leading).movedim(place, -1)
    return AverageSource(of.choose(cells.reshape(-1), tuple(cells.shape)), shares)


def require_alike(sources: Sequence[Source]) -> None:
    """Raise unless sources can be the steps of one map.

    Raises:
        ArgumentError: there are none.
        ShapeError: they are of several leading dimensions, dtypes or devices.
    """
    if not sources:
        raise ArgumentError("stack() needs at least one map")
    if len({(m.leading, m.dtype, m.device) for m in sources}) > 1:
        shapes = ", ".join(sorted({f"{tuple(m.shape)} {m.dtype} on {m.device}" for m in sources}))
        raise ShapeError(f"the steps of a stack must share leading dimensions, dtype and device; got {shapes}")


def _padded(part: Part, rows: range, columns: Rows, keys: int) -> Tensor:
    """A block of a part that may have fewer keys than are asked for; the weights beyond its keys are 0."""
    if isinstance(columns, range):
        start = min(columns.start, keys - 1)
        known = range(start, max(start + 1, min(columns.stop, keys)))
        weights = part(rows, known).weights
        if columns.start >= keys:
            return weights.new_zeros(*weights.shape[:-1], len(columns))
        return torch.nn.functional.pad(weights, (0, columns.stop - known.stop))
    beyond = columns >= keys
    return part(rows, columns.clamp_max(keys - 1)).weights.masked_fill(beyond, 0.0)


def _of(chosen: Rows, places: Rows) -> Rows:
    """The numbers, in the other source, of places among the chosen ones."""
    if not isinstance(chosen, range):
        return chosen[places.start : places.stop] if isinstance(places, range) else chosen[places]
    if isinstance(places, range):
        return range(chosen.start + places.start, chosen.start + places.stop)
    return places + chosen.start
