"""Weights T x S that a model computed itself. They are kept as they came, and can be read like every other map."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.backends.base import Call
from regard.inspection.capture.factors import Factors
from regard.inspection.capture.snapshot import Kept
from regard.mechanisms.biases.base import Bias, DenseBias
from regard.mechanisms.normalizations import Normalization, Softmax, Unnormalized
from regard.mechanisms.scores.base import Dot
from regard.mechanisms.shapes import Sizes

NAME = "the model's own softmax"
"""The name of the source of such a map."""


@dataclass(frozen=True, slots=True, eq=False)
class Logarithm(Bias):
    """The bias log P of given weights P (B, H, T, S): with scores of 0 the softmax gives P back."""

    weights: Bias

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """This is never called: `block` and `pairs` read from the weights."""
        raise AssertionError

    def block(self, *where: Any, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """The logarithms of a block of weights."""
        return self._log(self.weights.block(*where, query=query, key=key, sizes=sizes))

    def pairs(self, *where: Any, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """The logarithms of the weights of pairs."""
        return self._log(self.weights.pairs(*where, query=query, key=key, sizes=sizes))

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        """The logarithms for chosen pairs of batch and head."""
        return Logarithm(self.weights.select(batches, heads))

    @staticmethod
    def _log(weights: Tensor) -> Tensor:
        return weights.to(torch.promote_types(weights.dtype, torch.float32)).log()


def stored(weights: Kept, sizes: Sizes, *, sums_to_one: bool) -> Factors:
    """The factors of given weights P (batch..., H, T, S): scores of 0, and the bias log P."""
    P = weights.tensor.reshape(sizes.flat_batch, sizes.heads, sizes.queries, sizes.keys)
    nothing = P.new_zeros((*P.shape[:2], 1, 1), dtype=torch.promote_types(P.dtype, torch.float32))
    normalization: Normalization = Softmax() if sums_to_one else Unnormalized()
    call = Call(
        query=nothing.expand(-1, -1, sizes.queries, 1),
        key=nothing.expand(-1, -1, sizes.keys, 1),
        score=Dot(),
        normalization=normalization,
        mask=None,
        bias=Logarithm(DenseBias(P)),
        dropout=0.0,
        sizes=replace(sizes, kv_heads=sizes.heads),
    )

    def state() -> Tensor:
        dead = (P == 0).all(-1) if sums_to_one else torch.zeros(P.shape[:-1], dtype=torch.bool, device=P.device)
        return nothing.new_zeros(P.shape[:-1]).masked_fill(dead, -torch.inf)

    return Factors(sizes, call, state=state, held=(weights,))
