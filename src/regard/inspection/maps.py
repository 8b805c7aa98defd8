"""The map of a call that was watched: an `AttentionMap` whose factors are the model's own."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.backends import choose_backend
from regard.backends.base import Backend, Call
from regard.inspection.capture.factors import Factors
from regard.inspection.capture.snapshot import Kept
from regard.mechanisms.biases.base import Bias, DenseBias
from regard.mechanisms.normalizations import Normalization, Softmax, Unnormalized
from regard.mechanisms.scores.base import Dot
from regard.mechanisms.shapes import Sizes
from regard.weights import AttentionMap


class WatchedMap(AttentionMap):  # type: ignore[misc]
    """An `AttentionMap` of a model that was watched.

    What it is computed from is looked at again at each read: where the model has written to it since, the
    read raises `OverwrittenError`. Rows and columns that the model masked are exactly 0.
    """

    def __init__(self, factors: Factors) -> None:
        self._factors = factors
        self._value = None

    @property
    def _call(self) -> Call:  # type: ignore[override]
        return self._factors.call

    @property
    def _given(self) -> Tensor:  # type: ignore[override]
        return self._factors.state

    @property
    def _backend(self) -> Backend:  # type: ignore[override]
        return choose_backend(self._factors.call, None)

    @property
    def _leading(self) -> tuple[int, ...]:  # type: ignore[override]
        return self._factors.sizes.leading

    @property
    def shape(self) -> torch.Size:
        """(batch..., H, T, S)."""
        return torch.Size(self._factors.sizes.map_shape)

    def storages(self) -> dict[int, int]:
        """The bytes held, by storage, so that shared ones count once."""
        return self._factors.storages()

    def _choose(self, cells: Tensor, leading: tuple[int, ...]) -> AttentionMap:  # type: ignore[override]
        return AttentionMap(self._call, self._state, self._backend, self._leading, self._value)._choose(cells, leading)


class StoredMap(WatchedMap):  # type: ignore[misc]
    """A map whose weights the model computed itself, T x S, and which are kept as they came.

    It reads like every other map.
    """

    def __repr__(self) -> str:
        """What it is."""
        return f"StoredMap{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}: the model's own softmax"


@dataclass(frozen=True, slots=True, eq=False)
class Logarithm(Bias):
    """log P as a bias, P (B, H, T, S) being weights that exist: with scores of 0 it gives them back."""

    weights: Bias

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Never asked: blocks and pairs are read from the weights."""
        raise AssertionError

    def block(self, *where: Any, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """Logarithms of a block."""
        return self._log(self.weights.block(*where, query=query, key=key, sizes=sizes))

    def pairs(self, *where: Any, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """Logarithms of the pairs."""
        return self._log(self.weights.pairs(*where, query=query, key=key, sizes=sizes))

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        """The pairs' weights."""
        return Logarithm(self.weights.select(batches, heads))

    @staticmethod
    def _log(weights: Tensor) -> Tensor:
        return weights.to(torch.promote_types(weights.dtype, torch.float32)).log()


def stored(weights: Kept, sizes: Sizes, *, sums_to_one: bool) -> Factors:
    """The factors of weights that exist, (batch..., H, T, S): scores of 0 and log P as a bias."""
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
