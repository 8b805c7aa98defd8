"""The decisions of dropout: drawn by torch's generator, or hashed from indices by compiled code."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.nn.dropout_work import FIRST, MASKED, OF_RELU, RELU, SECOND, STEP, SUM, THIRD, WORK
from regard.tensors.guards import is_readable, is_recorded
from regard.tensors.readable import DTYPES, is_installed
from regard.tensors.thread_team import run_in_threads

LEVELS = 1 << 16
"""Steps of a probability: 16 random bits decide each element."""
SMALL = 1 << 16
"""Smaller tensors are left to torch's operations: loading numba takes longer."""
MOST = 1 << 32
"""The elements with independent random bits."""


class Decisions(ABC):
    """Decisions about a tensor's elements, and operations with them; y has the shape of that tensor."""

    scale: float

    @abstractmethod
    def masked(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Give y kept scale, in a dtype."""

    @abstractmethod
    def masked_relu(self, y: Tensor) -> Tensor:
        """Give max(y, 0) kept scale."""

    @abstractmethod
    def masked_sum(self, x: Tensor, y: Tensor) -> Tensor:
        """Give x + y kept scale, in the wider of their dtypes."""

    @abstractmethod
    def parts(self) -> tuple[tuple[Tensor, ...], Callable[..., "Decisions"]]:
        """The saved tensors of an autograd.Function, and a function from them to the decisions."""


@dataclass(frozen=True, eq=False)
class DrawnBits(Decisions):
    """Random words of torch's generator, of four decisions each."""

    bits: Tensor
    """16 random bits for each element, as int16 in the tensor's shape."""
    least: int
    scale: float

    @classmethod
    def draw(cls, like: Tensor, dropped: int) -> "DrawnBits":
        words = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device="cpu").random_(-(2**63), None)
        bits = words.view(torch.int16)[: like.numel()].view(like.shape)
        return cls(bits, dropped - LEVELS // 2, LEVELS / (LEVELS - dropped))

    def _kept(self, dtype: torch.dtype) -> Tensor:
        """1 for kept elements, else 0. Comparing into floats is three times as fast as into bools."""
        return torch.ge(self.bits, self.least, out=torch.empty(self.bits.shape, dtype=dtype, device="cpu"))

    def masked(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        return (y.to(dtype) * self._kept(dtype)).mul_(self.scale)

    def masked_relu(self, y: Tensor) -> Tensor:
        return y.clamp_min(0.0).mul_(self._kept(y.dtype)).mul_(self.scale)

    def masked_sum(self, x: Tensor, y: Tensor) -> Tensor:
        if x.dtype == y.dtype:
            return torch.addcmul(x, y, self._kept(y.dtype), value=self.scale)
        return torch.add(x, y * self._kept(y.dtype), alpha=self.scale)

    def parts(self) -> tuple[tuple[Tensor, ...], Callable[..., Decisions]]:
        least, scale = self.least, self.scale
        return (self.bits,), lambda bits: DrawnBits(bits, least, scale)


@dataclass(frozen=True, eq=False)
class PlacedBits(Decisions):
    """The hash of two keys and an element's index as its decision, in one pass of compiled code."""

    key: int
    second_key: int
    least: int
    """An element is kept if its 32 random bits are at least this."""
    scale: float

    @classmethod
    def draw(cls, dropped: int) -> "PlacedBits":
        both = int(torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None)) % 2**64
        return cls(both % 2**32, both >> 32, dropped * (MOST // LEVELS), LEVELS / (LEVELS - dropped))

    def masked(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        return self._run(MASKED, dtype, y) if _has_loops(y) else (y * self._kept(y) * self.scale).to(dtype)

    def masked_relu(self, y: Tensor) -> Tensor:
        return self._run(RELU, y.dtype, y) if _has_loops(y) else y.clamp_min(0.0) * self._kept(y) * self.scale

    def masked_sum(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape == y.shape and _has_loops(x, y):
            return self._run(SUM, torch.promote_types(x.dtype, y.dtype), y, x)
        return torch.add(x, y * self._kept(y), alpha=self.scale)

    def parts(self) -> tuple[tuple[Tensor, ...], Callable[..., Decisions]]:
        return (), lambda: self

    def _kept(self, like: Tensor) -> Tensor:
        """1 for kept elements, else 0: the compiled loop's hash by torch's operations, for graphs."""
        lower, places = MOST - 1, torch.arange(like.numel(), device="cpu")
        bits = (places * STEP + self.key) & lower
        bits = ((bits ^ (bits >> 16)) + self.second_key) & lower
        for shift, factor in ((17, FIRST), (11, SECOND), (15, THIRD)):
            bits = ((bits ^ (bits >> shift)) * factor) & lower
        return ((bits ^ (bits >> 14)) >= self.least).view(like.shape).to(like.dtype)

    def _run(self, kind: int, dtype: torch.dtype, y: Tensor, x: Tensor | None = None) -> Tensor:
        return _run(kind, dtype, y, x, self.scale, self._keys())

    def _keys(self) -> tuple[int, int, int]:
        return self.key, self.second_key, self.least


def of_masked_relu(grad: Tensor, answer: Tensor, scale: float) -> Tensor:
    """The gradient of `masked_relu`: passed where its result is above 0, times the scale.

    >>> of_masked_relu(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 0.5, 0.0]), 2.0)
    tensor([0., 4., 0.])
    """
    # A gradient with its own gradient needs torch's operations.
    if is_recorded() or not is_worth_it(grad.numel()) or not _has_loops(grad, answer):
        gradient: Tensor = torch.ops.aten.threshold_backward(grad, answer, 0).mul_(scale)
        return gradient
    return _run(OF_RELU, grad.dtype, grad, answer, scale)


def _run(
    kind: int, dtype: torch.dtype, y: Tensor, x: Tensor | None, scale: float, keys: tuple[int, int, int] = (0, 0, 0)
) -> Tensor:
    y, x = y.contiguous(), None if x is None else x.contiguous()
    answer = torch.empty(y.shape, dtype=dtype, device="cpu")
    addresses = 0 if x is None else x.data_ptr(), y.data_ptr(), answer.data_ptr()
    halves = x is not None and x.dtype == torch.bfloat16, y.dtype == torch.bfloat16, dtype == torch.bfloat16
    _call((kind, y.numel()), (*addresses, *halves, *keys, scale))
    return answer


def _call(what: tuple[int, int], told: tuple[int | float, ...]) -> None:
    """Run the compiled loop by as many threads as torch has; the arguments are WORK's, before and after its counter."""
    from regard.nn.dropout_loop import drop  # numba compiles here, or loads its cache

    counter = np.zeros(1, np.int64)
    work = np.array([(*what, counter.ctypes.data, *told)], WORK)
    run_in_threads(drop, work.ctypes.data, torch.get_num_threads() if what[1] >= SMALL else 1)


def _has_loops(*tensors: Tensor) -> bool:
    return is_readable(*tensors) and all(t.dtype in DTYPES for t in tensors)


def decide(like: Tensor, probability: float) -> Decisions:
    """Fresh decisions for a CPU tensor.

    Args:
        like: the tensor.
        probability: of dropping an element, in [0, 1); rounded to a multiple of 1 / LEVELS.

    >>> kept = decide(torch.ones(1000), 0.25).masked(torch.ones(1000), torch.float32)
    >>> sorted({round(float(number), 4) for number in kept.unique()})
    [0.0, 1.3333]
    """
    if is_worth_it(like.numel()) and _has_loops(like):
        return PlacedBits.draw(_dropped(probability))
    return DrawnBits.draw(like, _dropped(probability))


def _dropped(probability: float) -> int:
    return min(round(probability * LEVELS), LEVELS - 1)


def is_worth_it(count: int) -> bool:
    """Whether compiled code is faster than torch's operations for so many elements."""
    return SMALL <= count < MOST and is_installed()
