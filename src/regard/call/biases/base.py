"""Biases are added to the scores: tensors, and functions of positions and vectors.

A bias answers for any block of queries and keys, as a mask does, so no T x S tensor is needed. A tensor can be given as
a bias directly. Relative positions (ALiBi, T5, ...) are functions of the head and of the positions of query and key;
some of them read the vectors too.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.call.scores.base import pull_through_graph
from regard.call.shapes import Rows, Sizes, canonical_pairwise, index_tensor, take_pairs
from regard.errors import ShapeError
from regard.lazy import Displayed
from regard.tensors.guards import can_look, offset_and_shape

BiasPull = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor] | None]
"""From the gradient of a block of the bias to the gradients of the block's queries and keys; None if it reads neither.

It adds the gradients of the learned tensors to the tensors in the second argument. It is called once.
"""


class Bias(Displayed, ABC):
    """A function of a query and a key. Subclasses define `value`, and declare whether it reads the vectors."""

    reads_vectors: bool = False
    """Whether `value` reads the vectors of query and key, not only their positions."""

    @property
    def head_count(self) -> int | None:
        """The number of heads that it is made for; None if it fits any."""
        return None

    @abstractmethod
    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The bias for heads, rows i and columns j, index tensors that broadcast against the scores.

        `query` is (..., t, D) and `key` is (..., s, D), as the score prepared them. The result broadcasts
        to (..., t, s).
        """

    def learned(self) -> tuple[Tensor, ...]:
        """The tensors that take a gradient."""
        return ()

    def bind(self, sizes: Sizes, device: torch.device) -> "Bias":
        """Resolve the bias against a call: give it a definite offset and the canonical rank."""
        return self

    @property
    def per_key(self) -> Tensor | None:
        """The bias as a tensor (B or 1, H or 1, 1, S or 1), if bound and the same for every query; else None."""
        return None

    def split(self, sizes: Sizes, device: torch.device, *, causal: bool) -> tuple[Tensor, Tensor | None] | None:
        """The bias as a sum of one (B or 1, H or 1, 1, S) per key and one (B or 1, H or 1, T) per query, or None.

        `causal`: no query sees a later key. The sum then need not hold for later keys.
        """
        return None

    def is_zero(self, rows: range, columns: range) -> bool:
        """Whether a bound bias is 0 for all pairs of these rows and columns; False if a cheap check cannot tell."""
        return False

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """The bias (B or 1, H or 1, t or 1, s or 1) of some rows and columns; `query` and `key` are their vectors."""
        head = torch.arange(sizes.heads, device=query.device)[:, None, None]
        i, j = index_tensor(rows, query.device)[:, None], index_tensor(columns, query.device)
        answer = self.value(head, i, j, query, key)
        return answer[(None,) * (4 - answer.dim())]

    def linearize(
        self, rows: range, columns: range, *, query: Tensor, key: Tensor, sizes: Sizes, learned: Sequence[Tensor]
    ) -> tuple[Tensor, BiasPull]:
        """`block` without a graph, and its backward function.

        `learned` are the tensors of `learned()` with a gradient, of the bias before `select`. Autograd does the work,
        unless a subclass has a faster way.
        """
        query, key = query.detach().requires_grad_(), key.detach().requires_grad_()
        with torch.enable_grad():
            block = self.block(rows, columns, query=query, key=key, sizes=sizes)

        def pull(grad: Tensor, totals: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
            if not block.requires_grad:
                return None
            grad = summed_to(grad, block.shape).to(block.dtype)
            return pull_through_graph(block, grad, (query, key), learned, totals)

        return block.detach(), pull

    def laid_out(self, sizes: Sizes, device: torch.device) -> "Bias":
        """A bound bias in the fastest form for reading many small blocks."""
        return self

    @property
    def is_whole(self) -> bool:
        """Whether each pair has its own learned element; its gradient can then be written instead of added."""
        return False

    def pairs(self, rows: Tensor, columns: Tensor, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """The bias of N pairs; query and key are (N, B, H, 1, D), the result broadcasts to (N, B, H, 1, 1)."""
        head = torch.arange(sizes.heads, device=query.device)[:, None, None]
        i, j = (p[:, None, None, None, None] for p in (rows, columns))
        return self.value(head, i, j, query, key)

    def select(self, batches: Tensor, heads: Tensor) -> "Bias":
        """The bias of (batch, head) pairs, each a batch row of one head."""
        return SelectedBias(self, heads)


class BlockBias(Bias):
    """A bias that is read by blocks (`block`, `pairs`), and has no formula of a single pair."""

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        raise AssertionError

    @abstractmethod
    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class DenseBias(BlockBias):
    """A tensor given by the caller: the input's rank with each dimension full or 1, or (T, S)."""

    tensor: Tensor
    is_whole: bool = False
    """Whether it has an element for each pair, so no two pairs share a gradient."""

    def learned(self) -> tuple[Tensor, ...]:
        return (self.tensor,) if self.tensor.requires_grad else ()

    def bind(self, sizes: Sizes, device: torch.device) -> Bias:
        tensor = canonical_pairwise(self.tensor.to(device), sizes, "bias")
        return DenseBias(tensor, tensor.shape == (sizes.flat_batch, sizes.heads, sizes.queries, sizes.keys))

    @property
    def per_key(self) -> Tensor | None:
        return self.tensor if self.tensor.shape[-2] == 1 else None

    def split(self, sizes: Sizes, device: torch.device, *, causal: bool) -> tuple[Tensor, Tensor | None] | None:
        return None if self.per_key is None else (self.per_key, None)

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        return take_pairs(self.tensor, rows, columns)

    def pairs(self, rows: Tensor, columns: Tensor, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        i, j = _within((rows, columns), self.tensor.shape[2:])
        return self.tensor[:, :, i, j].movedim(-1, 0)[..., None, None]

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        batches, heads = _within((batches, heads), self.tensor.shape[:2])
        return Chosen(self.tensor, batches, heads, self.is_whole)


def _within(places: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """Places along dimensions, each full or 1."""
    return [place if n > 1 else torch.zeros_like(place) for place, n in zip(places, lengths, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Chosen(BlockBias):
    """A tensor with a choice of (batch, head) pairs: pair n stands in batch row n, head 0."""

    tensor: Tensor
    batches: Tensor
    heads: Tensor
    is_whole: bool = False
    """As in `DenseBias`: no two pairs share a gradient. Also, no pair is chosen twice."""

    def learned(self) -> tuple[Tensor, ...]:
        return (self.tensor,) if self.tensor.requires_grad else ()

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        part = take_pairs(self.tensor, rows, columns)
        # One pair is a slice. Its index is a value, and a compiled graph must not depend on values.
        if len(self.batches) == 1 and can_look(self.batches):
            return part[int(self.batches), int(self.heads)][None, None]
        return part[self.batches, self.heads].unsqueeze(1)

    def linearize(
        self, rows: range, columns: range, *, query: Tensor, key: Tensor, sizes: Sizes, learned: Sequence[Tensor]
    ) -> tuple[Tensor, BiasPull]:
        def pull(grad: Tensor, totals: Sequence[Tensor]) -> None:
            for total in totals:
                grad = summed_to(grad, (len(self.batches), 1, *take_pairs(total, rows, columns).shape[2:]))
                part = take_pairs(total, rows, columns)
                if self.is_whole:
                    for n, (batch, head) in enumerate(zip(self.batches.tolist(), self.heads.tolist(), strict=True)):
                        part[batch, head] = grad[n, 0]
                elif len(self.batches) == 1:
                    part[int(self.batches), int(self.heads)] += grad[0, 0]
                else:
                    # If several pairs read the same element, their gradients add up.
                    part.index_put_((self.batches, self.heads), grad[:, 0].to(part.dtype), accumulate=True)

        return self.block(rows, columns, query=query, key=key, sizes=sizes).detach(), pull

    def pairs(self, rows: Tensor, columns: Tensor, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        i, j = _within((rows, columns), self.tensor.shape[2:])
        each = self.tensor[self.batches[:, None], self.heads[:, None], i, j]
        return each.unsqueeze(1).movedim(-1, 0)[..., None, None]

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        return Chosen(self.tensor, self.batches[batches], self.heads[batches])


@dataclass(frozen=True, slots=True, eq=False)
class SelectedBias(Bias):
    """A bias with a choice of heads: pair n stands in batch row n, head 0."""

    bias: Bias
    heads: Tensor

    @property
    def reads_vectors(self) -> bool:  # type: ignore[override]
        return self.bias.reads_vectors

    def learned(self) -> tuple[Tensor, ...]:
        return self.bias.learned()

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.bias.value(self.heads[:, None, None, None], i, j, query, key)

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        return SelectedBias(self.bias, self.heads[batches])


def summed_to(grad: Tensor, shape: Sequence[int]) -> Tensor:
    return grad if grad.shape == tuple(shape) else grad.sum_to_size(*shape)


def as_bias(bias: "Bias | Tensor | None") -> Bias | None:
    """The caller's bias as a `Bias`.

    Raises:
        ShapeError: a bool tensor, which is a mask, or an object that is neither a bias nor a tensor.
    """
    if bias is None or isinstance(bias, Bias):
        return bias
    if isinstance(bias, Tensor) and bias.is_floating_point():
        if offset_and_shape(bias) is not None:
            raise ShapeError("bias= got torch's CausalBias, which is a mask and has no elements: pass it as mask=")
        return DenseBias(bias)
    what = str(bias.dtype) if isinstance(bias, Tensor) else type(bias).__name__
    raise ShapeError(f"bias= takes a float tensor or a regard bias, got {what}; a bool tensor goes in as mask=")
