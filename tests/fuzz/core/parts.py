"""One argument of a random call in two writings: the object that regard takes, and its formula."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Sides:
    """The sizes of a call, flat: B sequences, H heads over G heads of keys, T queries, S keys, widths D and E."""

    batch: tuple[int, ...]
    heads: int
    groups: int
    queries: int
    keys: int
    dim: int
    width: int
    has_heads: bool

    @property
    def flat(self) -> int:
        return int(torch.tensor(self.batch).prod()) if self.batch else 1

    @property
    def leading(self) -> tuple[int, ...]:
        return (*self.batch, self.heads) if self.has_heads else self.batch

    @property
    def full(self) -> tuple[int, ...]:
        return (*self.leading, self.queries, self.keys)

    @property
    def flat_full(self) -> tuple[int, int, int, int]:
        return (self.flat, self.heads, self.queries, self.keys)


@dataclass(frozen=True)
class Score:
    """A score: `make` builds regard's, `formula` gives (B, H, T, S) from (B, H, T, D) and (B, H, S, D)."""

    name: str
    make: Callable[[Tensors], Any]
    formula: Callable[[Tensors, Tensor, Tensor], Tensor]
    size: Callable[[Tensors, Tensor, Tensor], Tensor]
    """How large the numbers are that are summed for a score: its rounding error is so many units in the last place."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    rounds: bool = False
    """Whether it rounds to the dtype of the input on the way, as a linear layer does."""
    is_dot: bool = False
    """Whether it hands the vectors to a bias unchanged."""
    scale: float | None = None


@dataclass(frozen=True)
class Norm:
    """A normalization: `formula` gives weights from (B, H, T, S) scores, of which excluded ones are -inf."""

    name: str
    make: Callable[[Tensors], Any]
    formula: Callable[[Tensors, Tensor], Tensor]
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Added:
    """A bias: `formula` gives what broadcasts to (B, H, T, S), from the vectors where it reads them."""

    name: str
    make: Callable[[Tensors], Any]
    formula: Callable[[Tensors, Tensor, Tensor], Tensor]
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Allowed:
    name: str
    mask: Any
    allowed: Tensor
