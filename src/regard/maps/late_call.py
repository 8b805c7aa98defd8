"""A call whose map is put together when it is read, because most maps of short calls are not read."""

from typing import Protocol

from torch import Tensor

from regard.backends import BACKENDS
from regard.backends.base import Call
from regard.maps.call_source import CallSource, GivenFactors, Unwritten, dot_logs
from regard.mechanisms.masks.base import Mask
from regard.mechanisms.scores.base import ScaledDot
from regard.mechanisms.shapes import Sizes
from regard.mechanisms.tensor_tree import tensors_of_tree
from regard.torch_private import counted_version


class Decided(Protocol):
    """What is known of a call of softmax of scaled dot products before it runs (`regard.settled_calls.Settled`)."""

    @property
    def sizes(self) -> Sizes:
        """The sizes of the call."""

    @property
    def scale(self) -> float:
        """What dot products are multiplied with."""

    def call(self, query: Tensor, key: Tensor, score: ScaledDot, mask: Mask | None) -> Call:
        """The whole call."""


class LateCall:
    """What a call leaves for whoever may read its weights. All of it is the caller's own, as it was when it ran."""

    __slots__ = ("_decided", "_key", "_lse", "_mask", "_query", "_score", "_tensors", "_versions")

    def __init__(
        self, decided: Decided, query: Tensor, key: Tensor, score: ScaledDot, mask: Mask | None, lse: Tensor
    ) -> None:
        # (Each line here waits for memory behind a long kernel: what can be made later is.)
        self._decided, self._query, self._key, self._score, self._mask = decided, query, key, score, mask
        self._lse = lse
        self._tensors = (query, key) if mask is None else (query, key, *tensors_of_tree(mask))
        self._versions = (*map(counted_version, self._tensors),)

    @property
    def _unwritten(self) -> Unwritten:
        return Unwritten(self._tensors, self._versions)

    @property
    def _state(self) -> Tensor | None:
        return self._lse if self._lse.dtype == self._query.dtype else None

    def source(self) -> CallSource:
        """The source of the weights."""
        decided = self._decided
        call = decided.call(self._query, self._key, self._score, self._mask)
        factors = GivenFactors(call, self._state, self._unwritten)
        return CallSource(factors, decided.sizes.leading, BACKENDS["fused"])

    def short_weights(self, limit_bytes: int) -> Tensor | None:
        """All weights (B, H, T, S) where nothing is masked and they take no more memory; else None.

        They have the bits of those that the source makes.

        Raises:
            OverwrittenError: somebody has written to what it reads.
        """
        query, key, lse, sizes = self._query, self._key, self._state, self._decided.sizes
        if self._mask is not None or lse is None or sizes.heads != sizes.kv_heads:
            return None
        if lse.numel() * sizes.keys * lse.itemsize > limit_bytes:
            return None
        if (*map(counted_version, self._tensors),) != self._versions:
            self._unwritten.check()
        logs = dot_logs(query.flatten(0, 1), key.flatten(0, 1), lse, self._decided.scale)
        return logs.exp_().view(*lse.shape, sizes.keys)
