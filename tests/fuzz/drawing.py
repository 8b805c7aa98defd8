"""The drawing of every ground: hypothesis draws, so that a failure shrinks to its smallest case."""

import sys
from collections.abc import Callable, Sequence
from random import Random
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
        return torch.randint(least, most + 1, shape, generator=self.generator)

    def bools(self, *shape: int, share: float = 0.6) -> Tensor:
        return torch.rand(shape, generator=self.generator) < share


class Covering(Drawn):
    """Draws without hypothesis, and at each place in the code the named choice that was drawn there least so far.

    A search meets a choice by chance; so many cases as a place has choices meet all of them. Of numbers and types the
    first choice, which is the plainest, is drawn mostly: what a named choice does shows beside plain ones.
    """

    def __init__(self, counts: dict[Any, list[int]], seed: int) -> None:
        self.counts, self.random = counts, Random(seed)
        super().__init__(lambda strategy: self._refuse())

    def _refuse(self) -> None:
        raise TypeError("only numbers, choices and permutations are drawn here")

    def number(self, least: int, most: int) -> int:
        return self.random.randint(least, most)

    def shuffled(self, choices: Sequence[T]) -> list[T]:
        return self.random.sample(list(choices), len(choices))

    def of(self, choices: Sequence[T]) -> T:
        place = sys._getframe(1)
        names = tuple(getattr(one, "__qualname__", one) for one in choices)
        if not all(isinstance(one, str) for one in names):
            return choices[0] if self.random.random() < 0.6 else self.random.choice(choices)
        counts = self.counts.setdefault((place.f_code.co_filename, place.f_lineno, names), [0] * len(choices))
        least = self.random.choice([n for n, count in enumerate(counts) if count == min(counts)])
        counts[least] += 1
        return choices[least]
