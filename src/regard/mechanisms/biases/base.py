"""What is added to the scores: tensors, and functions of positions and vectors.

A bias answers for any block of queries and keys, as a mask does, so that a T x S tensor need not exist.
A tensor is a bias as it stands; positions as biases (ALiBi, T5, ...) are functions of the head and of
where query and key stand; some of them read the vectors too.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.mechanisms.shapes import Sizes, canonical_pairwise, index_tensor, take_pairs
from regard.mechanisms.transforms import can_look

_KEEPING = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
"""What is chosen for some heads is one graph for all tiles."""

BiasPull = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor] | None]
"""From the gradient of a block of the bias to those of the block's queries and keys; None if it reads neither.

The gradients of what is learned are added to the tensors that come second. It is called once.
"""


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
        i, j = index_tensor(rows, query.device)[:, None], index_tensor(columns, query.device)
        answer = self.value(head, i, j, query, key)
        return answer[(None,) * (4 - answer.dim())]

    def linearize(
        self, rows: range, columns: range, *, query: Tensor, key: Tensor, sizes: Sizes, learned: Sequence[Tensor]
    ) -> tuple[Tensor, BiasPull]:
        """`block` without a graph, and how its gradient goes back.

        `learned` are those tensors of `learned()` that take a gradient, of the bias that this one was selected from.
        Autograd answers, unless a bias knows a shorter way.
        """
        query, key = query.detach().requires_grad_(), key.detach().requires_grad_()
        with torch.enable_grad():
            block = self.block(rows, columns, query=query, key=key, sizes=sizes)

        def pull(grad: Tensor, totals: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
            if not block.requires_grad:
                return None
            inputs = (query, key, *learned)
            d_query, d_key, *others = torch.autograd.grad(
                block,
                inputs,
                summed_to(grad, block.shape).to(block.dtype),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for total, other in zip(totals, others, strict=True):
                total += other
            return d_query, d_key

        return block.detach(), pull

    def laid_out(self, sizes: Sizes, device: torch.device) -> "Bias":
        """A bound bias in the form that many small blocks are read from best."""
        return self

    @property
    def is_whole(self) -> bool:
        """Whether every pair has a learned number of its own, whose gradient is written rather than added."""
        return False

    def pairs(self, rows: Tensor, columns: Tensor, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """The bias of N pairs; query and key are (N, B, H, 1, D), the answer broadcasts to (N, B, H, 1, 1)."""
        head = torch.arange(sizes.heads, device=query.device)[:, None, None]
        i, j = (p[:, None, None, None, None] for p in (rows, columns))
        return self.value(head, i, j, query, key)

    def select(self, batches: Tensor, heads: Tensor) -> "Bias":
        """The bias of (batch, head) pairs, each a batch row of one head."""
        return SelectedBias(self, heads)


@dataclass(frozen=True, slots=True, eq=False)
class DenseBias(Bias):
    """A tensor of the caller's: the input's rank with each dimension full or 1, or (T, S)."""

    tensor: Tensor
    is_whole: bool = False
    """Known to hold a number for each pair, so that no two of them share a gradient."""

    def learned(self) -> tuple[Tensor, ...]:
        """The tensor, if it takes a gradient."""
        return (self.tensor,) if self.tensor.requires_grad else ()

    def bind(self, sizes: Sizes, device: torch.device) -> Bias:
        """Give the tensor the canonical rank."""
        tensor = canonical_pairwise(self.tensor.to(device), sizes, "bias")
        return DenseBias(tensor, tensor.shape == (sizes.flat_batch, sizes.heads, sizes.queries, sizes.keys))

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
        """The tensor seen through the choice; nothing is copied."""
        batches, heads = (
            p if n > 1 else torch.zeros_like(p) for p, n in zip((batches, heads), self.tensor.shape[:2], strict=True)
        )
        return Chosen(self.tensor, batches, heads, self.is_whole)


@dataclass(frozen=True, slots=True, eq=False)
class Chosen(Bias):
    """A tensor seen through a choice of (batch, head) pairs: pair n stands in batch row n, head 0."""

    tensor: Tensor
    batches: Tensor
    heads: Tensor
    is_whole: bool = False
    """As of `DenseBias`; the pairs differ from each other."""

    def learned(self) -> tuple[Tensor, ...]:
        """The tensor, if it takes a gradient."""
        return (self.tensor,) if self.tensor.requires_grad else ()

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Never asked: blocks and pairs are read from the tensor."""
        raise AssertionError

    def block(
        self, rows: range | Tensor, columns: range | Tensor, *, query: Tensor, key: Tensor, sizes: Sizes
    ) -> Tensor:
        """The pairs' slices of the block, so that no more than that is copied."""
        return self._of_pairs(take_pairs(self.tensor, rows, columns))

    def linearize(
        self, rows: range, columns: range, *, query: Tensor, key: Tensor, sizes: Sizes, learned: Sequence[Tensor]
    ) -> tuple[Tensor, BiasPull]:
        """The gradient goes to where the block came from."""

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
                    # Pairs that read the same place add up.
                    part.index_put_((self.batches, self.heads), grad[:, 0].to(part.dtype), accumulate=True)

        return self.block(rows, columns, query=query, key=key, sizes=sizes).detach(), pull

    def pairs(self, rows: Tensor, columns: Tensor, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """The tensor at the pairs."""
        i, j = (
            p if n > 1 else torch.zeros_like(p) for p, n in zip((rows, columns), self.tensor.shape[2:], strict=True)
        )
        each = self.tensor[self.batches[:, None], self.heads[:, None], i, j]
        return each.unsqueeze(1).movedim(-1, 0)[..., None, None]

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        """A choice among the pairs."""
        return Chosen(self.tensor, self.batches[batches], self.heads[batches])

    def _of_pairs(self, tensor: Tensor) -> Tensor:
        # A slice where there is one; which one is a value, on which no compiled graph may depend.
        if len(self.batches) == 1 and can_look(self.batches):
            return tensor[int(self.batches), int(self.heads)][None, None]
        return tensor[self.batches, self.heads].unsqueeze(1)


@dataclass(frozen=True, slots=True, eq=False)
class SelectedBias(Bias):
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
        return SelectedBias(self.bias, self.heads[batches])


def summed_to(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """A gradient, summed over the dimensions along which something of that shape was broadcast."""
    return grad if grad.shape == tuple(shape) else grad.sum_to_size(*shape)


def as_bias(bias: "Bias | Tensor | None") -> Bias | None:
    """A bias from what a caller may hand over.

    Raises:
        ShapeError: a bool tensor, which is a mask, or another kind of thing.
    """
    if bias is None or isinstance(bias, Bias):
        return bias
    if isinstance(bias, Tensor) and bias.is_floating_point():
        return DenseBias(bias)
    what = str(bias.dtype) if isinstance(bias, Tensor) else type(bias).__name__
    raise ShapeError(f"bias= takes a float tensor or a regard bias, got {what}; a bool tensor goes in as mask=")
