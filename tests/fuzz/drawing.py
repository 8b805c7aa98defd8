"""What every ground draws with: hypothesis draws, so that a failure shrinks to its smallest case."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

T = TypeVar("T")


class Drawn:
    """The random choices of one case. The first of several choices is the simplest: a failure shrinks towards it."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.generator = torch.Generator().manual_seed(self.number(0, 2**20))

    def number(self, least: int, most: int) -> int:
        """An integer, both ends included."""
        return int(self.draw(st.integers(least, most)))

    def of(self, choices: Sequence[T]) -> T:
        return choices[self.number(0, len(choices) - 1)] if len(choices) > 1 else choices[0]

    def chance(self, one_in: int = 2) -> bool:
        """True once in so many cases, and never in the smallest case."""
        return self.number(0, one_in - 1) == one_in - 1

    def some(self, choices: Sequence[T], most: int) -> list[T]:
        return [self.of(choices) for _ in range(self.number(0, most))]

    def shuffled(self, choices: Sequence[T]) -> list[T]:
        return list(self.draw(st.permutations(list(choices))))

    # The numbers in tensors are not drawn one by one: they come from a generator whose seed is drawn.

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers in float64."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def integers(self, least: int, most: int, *shape: int) -> Tensor:
        """Integers, both ends included."""
        return torch.randint(least, most + 1, shape, generator=self.generator)

    def bools(self, *shape: int, share: float = 0.6) -> Tensor:
        """Bools, of which this share is True."""
        return torch.rand(shape, generator=self.generator) < share
