"""The evidence for calls being steps of one generation: fingerprints of their queries and keys.

A cache passes the keys of the last step to the next one. So calls of one generation share key vectors, in any memory: a
cache may append to them, drop the oldest, write into a buffer of fixed size, or reorder the rows of its batch. A
fingerprint is a projection of a vector on a few fixed random directions: different vectors have different fingerprints.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.tensors.fresh import Fresh
from regard.tensors.torch_private import DisableTorchFunction
from regard.tensors.undisturbed import undisturbed

DIRECTIONS = 2
"""The elements of a fingerprint. Different vectors agree in one of them with a chance of about `TOLERANCE`."""
SAME = 1e-4
"""How far fingerprints of the same vector may be apart, relative to their size: far more than rounding makes, as where
keys are computed anew at each step; far less than a cache of 8 bits does."""

LARGEST = 1024
"""How many of the last elements of a vector are compared."""


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The vectors that identify a call, (B, G, length, D) or (B, length, D): its queries (or its weights, if only these
    were seen), and its keys or values.
    """

    queries: Tensor
    keys: Tensor
    given: Tensor
    """The tensor of keys or values the model handed over."""
    fresh: Fresh | None = None
    """The queries and the keys if the call's map holds them, for deferred fingerprints."""

    def printed(self) -> "Prints | None":
        """The fingerprints; None for tensors without data (meta tensors)."""
        return self.begun()()

    def begun(self) -> "Callable[[], Prints | None]":
        """The same, in two parts: the products are made at once, and the second part alone waits for them."""
        return _begun(self.queries, self.keys, ViewedMemory.of(self.given))

    def later(self) -> "Callable[[], Prints | None] | None":
        """Computes the fingerprints on demand (None if their tensors were overwritten); None if the map does not hold
        them, where waiting would keep memory alive.
        """
        fresh = self.fresh
        if fresh is None:
            return None
        queries, keys, memory = self.queries, self.keys, ViewedMemory.of(self.given)

        def printed() -> Prints | None:
            return None if fresh.changed() is not None else _begun(queries, keys, memory)()

        return printed


@dataclass(frozen=True, slots=True, eq=False)
class KnownEvidence:
    prints: "Prints | None"

    def printed(self) -> "Prints | None":
        return self.prints

    def begun(self) -> "Callable[[], Prints | None]":
        return self.printed

    def later(self) -> None:
        """None: nothing waits."""


AnyEvidence = Evidence | KnownEvidence


def joined_prints(before: "Prints | None", new: "Prints | None") -> "Prints | None":
    if before is None or new is None:
        return new
    keys = torch.cat([before.keys, new.keys], 1)
    return Prints(new.queries, keys, new.memory, before.keys.shape[1] + new.filled)


@dataclass(frozen=True, slots=True, eq=False)
class Prints:
    """The fingerprints of a call's queries (B, T, n) and keys (B, S, n), and the memory of the keys."""

    queries: Tensor
    keys: Tensor
    memory: "ViewedMemory"
    filled: int
    """The number of keys before the zeros at the end of a buffer."""


def _begun(queries: Tensor, keys: Tensor, memory: "ViewedMemory") -> Callable[[], Prints | None]:
    if keys.is_meta or queries.is_meta or not keys.numel():
        return lambda: None
    # Without this a watch would take the products computed here for calls of the model.
    with undisturbed(), DisableTorchFunction():
        prints, asked = _print(keys), _print(queries)

    def printed() -> Prints:
        # Of self-attention each query has a key, which may be zeros: that of a token of padding, without an embedding.
        with undisturbed(), DisableTorchFunction():
            filled = max(_filled(prints), min(asked.shape[1], prints.shape[1]))
        return Prints(asked, prints, memory, filled)

    return printed


def same_rows(one: Tensor, other: Tensor) -> Tensor:
    """Equality of the rows of two batches of fingerprints (B, L, n) and (C, L, n): bool (B, C)."""
    # Rows whose sums differ are not the same. Only the other pairs are looked at closely.
    weights = torch.linspace(1.0, 2.0, one.shape[1], dtype=torch.float32, device=one.device)[:, None]
    sums, others = ((prints * weights).sum(1) for prints in (one, other))
    size = (one.abs() * weights.abs()).sum(1).amax(-1)[:, None]
    found = (sums[:, None] - others).abs().amax(-1) <= SAME * size
    rows, columns = found.nonzero().unbind(1)
    found[rows, columns] = _close(one[rows], other[columns]).all(-1)
    return found


def _filled(keys: Tensor) -> int:
    if bool(keys[:, -1].any()):
        return keys.shape[1]
    used = keys.any(-1).any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else keys.shape[1]


def _close(one: Tensor, other: Tensor) -> Tensor:
    size = one.abs().amax(-1)
    # A vector may by chance be nearly orthogonal to all directions; its fingerprint then has the rounding of others.
    return (one - other).abs().amax(-1) <= SAME * size + SAME / 100 * (size.mean() if size.numel() else 0.0)


def _print(vectors: Tensor) -> Tensor:
    vectors = vectors.detach()[..., -LARGEST:]
    vectors = (vectors if vectors.dim() == 4 else vectors.unsqueeze(1)).float()
    directions = _directions(vectors.shape[1], vectors.shape[3], vectors.device)
    if vectors.stride(1) == vectors.shape[3] * vectors.stride(3):
        # The heads of a token lie side by side: one product over all of them is the sum already.
        return vectors.transpose(1, 2).flatten(2) @ directions.flatten(0, 1)
    return (vectors @ directions).sum(1)


@dataclass(frozen=True, slots=True, eq=False)
class ViewedMemory:
    reference: Any
    """A weak reference to its storage."""
    place: tuple[int, tuple[int, ...]]

    @classmethod
    def of(cls, tensor: Tensor) -> "ViewedMemory":
        from torch.multiprocessing.reductions import StorageWeakRef

        return cls(StorageWeakRef(tensor.untyped_storage()), (int(tensor.storage_offset()), tensor.stride()))

    def is_that_of(self, other: "ViewedMemory") -> bool:
        return self.place == other.place and bool(self.reference.cdata == other.reference.cdata)


@lru_cache(maxsize=256)
def _directions(groups: int, dim: int, device: torch.device) -> Tensor:
    # Cached, so the default dtype and device of the first call must not be in them.
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(groups, dim, DIRECTIONS, generator=generator, dtype=torch.float32, device="cpu").to(device)
