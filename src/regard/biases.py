"""What is added to the scores: tensors, and functions of positions and vectors.

A bias answers for any block of queries and keys, as a mask does, so that a T x S tensor need not exist.
A tensor is a bias as it stands; positions as biases (ALiBi, T5, ...) are functions of the head and of
where query and key stand; some of them read the vectors too.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.shapes import Sizes, canonical_pairwise, take_pairs


class Bias(ABC):
    """A function of a query and a key. Subclasses say `value`, and whether they read the vectors."""

    reads_vectors: bool = False
    """Whether `value` looks at query and key themselves, not only at where they stand."""

    @abstractmethod
    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The bias for heads, rows i and columns j, index tensors that broadcast against the scores.

        `query` is (..., t, D) and `key` (..., s, D), as the score prepared them; the answer broadcasts
        to (..., t, s).
        """

    def learned(self) -> tuple[Tensor, ...]:
        """The tensors that take a gradient."""
        return ()

    def bind(self, sizes: Sizes, device: torch.device) -> "Bias":
        """Resolve the bias against a call: definite offsets, canonical rank."""
        return self

    def split(self, sizes: Sizes, device: torch.device, *, causal: bool) -> tuple[Tensor, Tensor | None] | None:
        """The bias as a sum of one (B or 1, H or 1, 1, S) per key and one (B or 1, H or 1, T) per query, or None.

        `causal` says that no query sees a key after it, where the sum need not hold then.
        """
        return None

    def block(
        self, rows: range | Tensor, columns: range | Tensor, *, query: Tensor, key: Tensor, sizes: Sizes
    ) -> Tensor:
        """The bias (B or 1, H or 1, t or 1, s or 1) of some rows and columns, whose vectors are given."""
        head = torch.arange(sizes.heads, device=query.device)[:, None, None]
        i, j = positions(rows, query.device)[:, None], positions(columns, query.device)
        answer = self.value(head, i, j, query, key)
        return answer[(None,) * (4 - answer.dim())]

    def pairs(self, rows: Tensor, columns: Tensor, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """The bias of N pairs; query and key are (N, B, H, 1, D), the answer broadcasts to (N, B, H, 1, 1)."""
        head = torch.arange(sizes.heads, device=query.device)[:, None, None]
        i, j = (p[:, None, None, None, None] for p in (rows, columns))
        return self.value(head, i, j, query, key)

    def select(self, batches: Tensor, heads: Tensor) -> "Bias":
        """The bias of (batch, head) pairs, each a batch row of one head."""
        return Selected(self, heads)


@dataclass(frozen=True, slots=True, eq=False)
class Dense(Bias):
    """A tensor of the caller's: the input's rank with each dimension full or 1, or (T, S)."""

    tensor: Tensor

    def learned(self) -> tuple[Tensor, ...]:
        """The tensor, if it takes a gradient."""
        return (self.tensor,) if self.tensor.requires_grad else ()

    def bind(self, sizes: Sizes, device: torch.device) -> Bias:
        """Give the tensor the canonical rank."""
        return Dense(canonical_pairwise(self.tensor.to(device), sizes, "bias"))

    def split(self, sizes: Sizes, device: torch.device, *, causal: bool) -> tuple[Tensor, Tensor | None] | None:
        """The tensor itself, where it is the same for every query."""
        return (self.tensor, None) if self.tensor.shape[-2] == 1 else None

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Never asked: blocks and pairs are read from the tensor."""
        raise AssertionError

    def block(
        self, rows: range | Tensor, columns: range | Tensor, *, query: Tensor, key: Tensor, sizes: Sizes
    ) -> Tensor:
        """A slice, so that its gradient is one too."""
        return take_pairs(self.tensor, rows, columns)

    def pairs(self, rows: Tensor, columns: Tensor, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """The tensor at the pairs."""
        i, j = (
            p if n > 1 else torch.zeros_like(p) for p, n in zip((rows, columns), self.tensor.shape[2:], strict=True)
        )
        return self.tensor[:, :, i, j].movedim(-1, 0)[..., None, None]

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        """The pairs' slices."""
        index = (
            p if n > 1 else torch.zeros_like(p) for p, n in zip((batches, heads), self.tensor.shape[:2], strict=True)
        )
        return Dense(self.tensor[tuple(index)].unsqueeze(1))


@dataclass(frozen=True, slots=True, eq=False)
class Given(Bias):
    """A block that is already cut out: what every question is answered with."""

    tensor: Tensor

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The block."""
        return self.tensor


@dataclass(frozen=True, slots=True, eq=False)
class Selected(Bias):
    """A bias seen through a choice of heads: pair n stands in batch row n, head 0."""

    bias: Bias
    heads: Tensor

    @property
    def reads_vectors(self) -> bool:  # type: ignore[override]
        """As the bias does."""
        return self.bias.reads_vectors

    def learned(self) -> tuple[Tensor, ...]:
        """The bias's own."""
        return self.bias.learned()

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The bias of each pair's head."""
        return self.bias.value(self.heads[:, None, None, None], i, j, query, key)

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        """The heads of those batch rows."""
        return Selected(self.bias, self.heads[batches])


def as_bias(bias: "Bias | Tensor | None") -> Bias | None:
    """A bias from what a caller may hand over.

    Raises:
        ShapeError: a bool tensor, which is a mask, or another kind of thing.
    """
    if bias is None or isinstance(bias, Bias):
        return bias
    if isinstance(bias, Tensor) and bias.is_floating_point():
        return Dense(bias)
    what = str(bias.dtype) if isinstance(bias, Tensor) else type(bias).__name__
    raise ShapeError(f"bias= takes a float tensor or a regard bias, got {what}; a bool tensor goes in as mask=")


def positions(where: range | Tensor, device: torch.device) -> Tensor:
    """Positions as an index tensor."""
    return torch.arange(where.start, where.stop, device=device) if isinstance(where, range) else where
