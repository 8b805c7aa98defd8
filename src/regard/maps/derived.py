"""Maps made of other maps: averages, choices of rows and columns, steps joined, weights times values."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Self, final

import torch
from torch import Tensor

from regard.errors import ArgumentError, ShapeError
from regard.maps import statistics as st
from regard.maps.base import LazyMap
from regard.maps.sources import OfAverage, OfFactor, OfSelection, OfSteps
from regard.maps.tiles import Rows, Source, Statistic
from regard.mechanisms.byte_size import human


class _Derived(LazyMap):
    """What maps of other maps share."""

    def _product(self, x: Tensor) -> Tensor:
        return self._laid_out(self._ask(st.Product(self._values(x)))[0])

    def __repr__(self) -> str:
        """What it is, and what dense would cost."""
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"{type(self).__name__}{tuple(self.shape)} {kind} on {self.device}: {self._what()}; "
            f"dense() would take {human(self.dense_bytes)}"
        )

    @abstractmethod
    def _what(self) -> str:
        """What it is, in a few words."""


@final
class Average(_Derived):
    """The mean of a map over its last leading dimension, or a mean with shares that sum to 1."""

    def __init__(self, of: LazyMap, shares: Tensor | None = None) -> None:
        self._of, self._shares = of, shares

    @property
    def shape(self) -> torch.Size:
        """Without the dimension that the mean is over."""
        return torch.Size((*self._of.leading[:-1], *self._of.shape[-2:]))

    @property
    def dtype(self) -> torch.dtype:
        """The map's."""
        return self._of.dtype

    @property
    def device(self) -> torch.device:
        """The map's."""
        return self._of.device

    @property
    def _count(self) -> int:
        return self._of.leading[-1]

    def _source(self) -> Source:
        return OfAverage(self._of._source(), self._count, self._shares)

    def _choose(self, cells: Tensor, leading: tuple[int, ...]) -> Self:
        inner = cells[:, None] * self._count + torch.arange(self._count, device=cells.device)
        return type(self)(self._of._choose(inner.reshape(-1), (*leading, self._count)), self._shares)

    def _at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        """Sums and products are the means of the heads' own."""
        if isinstance(statistic, st.Product | st.TransposedProduct):
            x = statistic.x if len(statistic.x) == 1 else statistic.x.repeat_interleave(self._count, 0)
            statistic = replace(statistic, x=x)
        elif not isinstance(statistic, st.Received | st.Distance):
            return None
        found = self._of._at_once(statistic)
        return None if found is None else (self._mean(found[0]),)

    def _mean(self, answer: Tensor) -> Tensor:
        answer = answer.unflatten(0, (-1, self._count))
        return answer.mean(1) if self._shares is None else torch.einsum("cn...,n->c...", answer, self._shares)

    def _what(self) -> str:
        return f"the mean over {self._count} of {self._of!r}"


@final
class Selection(_Derived):
    """Some queries and keys of a map. Weights are as they were: rows of a choice of keys need not sum to 1."""

    def __init__(self, of: LazyMap, rows: Rows, columns: Rows) -> None:
        self._of, self._rows, self._columns = of, rows, columns

    @property
    def shape(self) -> torch.Size:
        """As many queries and keys as chosen."""
        return torch.Size((*self._of.leading, len(self._rows), len(self._columns)))

    @property
    def dtype(self) -> torch.dtype:
        """The map's."""
        return self._of.dtype

    @property
    def device(self) -> torch.device:
        """The map's."""
        return self._of.device

    def _source(self) -> Source:
        return OfSelection(self._of._source(), self._rows, self._columns)

    def _choose(self, cells: Tensor, leading: tuple[int, ...]) -> Self:
        return type(self)(self._of._choose(cells, leading), self._rows, self._columns)

    def _at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        return None

    def _what(self) -> str:
        return f"some of {self._of!r}"


@final
class Stack(_Derived):
    """The steps of a generation as one map: their rows below one another, exact zeros after a step's last key."""

    def __init__(self, maps: Sequence[LazyMap]) -> None:
        self._maps = list(maps)

    @property
    def shape(self) -> torch.Size:
        """All queries, and the most keys."""
        queries, keys = sum(m.shape[-2] for m in self._maps), max(m.shape[-1] for m in self._maps)
        return torch.Size((*self._maps[0].leading, queries, keys))

    @property
    def dtype(self) -> torch.dtype:
        """The maps'."""
        return self._maps[0].dtype

    @property
    def device(self) -> torch.device:
        """The maps'."""
        return self._maps[0].device

    def _source(self) -> Source:
        return OfSteps([m._source() for m in self._maps])

    def _choose(self, cells: Tensor, leading: tuple[int, ...]) -> Self:
        return type(self)([m._choose(cells, leading) for m in self._maps])

    def _at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        """Entropy and moments of a query are its step's."""
        if not isinstance(statistic, st.Entropy | st.Moments):
            return None
        found = [m._ask(statistic) for m in self._maps]
        return tuple(torch.cat(steps, dim=1) for steps in zip(*found, strict=True))

    def _what(self) -> str:
        return f"{len(self._maps)} steps"


@final
class Weighted(_Derived):
    """The weights of a map times a_i . b_j, or a_i . b_j alone."""

    def __init__(self, of: LazyMap, left: Tensor | None, right: Tensor, what: str, *, alone: bool = False) -> None:
        self._of, self._left, self._right, self._name, self._alone = of, left, right, what, alone

    @property
    def shape(self) -> torch.Size:
        """The map's."""
        return self._of.shape

    @property
    def dtype(self) -> torch.dtype:
        """The map's."""
        return self._of.dtype

    @property
    def device(self) -> torch.device:
        """The map's."""
        return self._of.device

    def _source(self) -> Source:
        return OfFactor(None if self._alone else self._of._source(), self._left, self._right, self.shape[-2])

    def _choose(self, cells: Tensor, leading: tuple[int, ...]) -> Self:
        left = None if self._left is None else self._left[cells]
        of = self._of._choose(cells, leading)
        return type(self)(of, left, self._right[cells], self._name, alone=self._alone)

    def _at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        return None

    def _what(self) -> str:
        return f"{self._name} of {self._of!r}"


def average(of: LazyMap, dim: int, weights: Tensor | Sequence[float] | None) -> Average:
    """The mean over a leading dimension. See `LazyMap.average`.

    Raises:
        ArgumentError: the dimension is not one of those before queries and keys, or not as many weights.
    """
    leading = of.leading
    place = dim + of.ndim if dim < 0 else dim
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
        return Average(of, shares)
    cells = torch.arange(math.prod(leading), device=of.device).view(leading).movedim(place, -1)
    return Average(of._choose(cells.reshape(-1), tuple(cells.shape)), shares)


def stack(maps: Sequence[LazyMap]) -> Stack:
    """The steps of a generation as one map: rows below one another, exact zeros after each step's last key.

    Args:
        maps: (batch..., H, T_t, S_t), one for each step, usually with T_t = 1.

    Returns:
        A map (batch..., H, sum of T_t, largest S_t).

    Raises:
        ArgumentError: no maps.
        ShapeError: maps of several leading dimensions, dtypes or devices.

    >>> import regard
    >>> k = torch.zeros(3, 1)
    >>> steps = [regard.attention(k[:1], k[:n], k[:n], return_weights=True).weights for n in (2, 3)]
    >>> stack(steps).dense()
    tensor([[0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    if not maps:
        raise ArgumentError("stack() needs at least one map")
    kinds = {(m.leading, m.dtype, m.device) for m in maps}
    if len(kinds) > 1:
        shapes = ", ".join(sorted({f"{tuple(m.shape)} {m.dtype} on {m.device}" for m in maps}))
        raise ShapeError(f"the steps of a stack must share leading dimensions, dtype and device; got {shapes}")
    return Stack(maps)
