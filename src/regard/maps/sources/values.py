"""Two optional parts of a call: its values, and the gradient of its output."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from regard.call.shapes import repeated
from regard.errors import ArgumentError, GradientError
from regard.tensors.fresh import Fresh

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class FixedResult(Generic[T]):
    """A function that returns a fixed object, which is not that of others; unlike a lambda, it can be pickled."""

    made: T

    def __call__(self) -> T:
        return self.made


@dataclass(frozen=True, slots=True, eq=False)
class HeldValues:
    made: Tensor
    fresh: Fresh

    @classmethod
    def of(cls, value: Tensor) -> "HeldValues":
        return cls(value, Fresh(values=value))

    def __call__(self) -> Tensor:
        self.fresh.check()
        return self.made


def read_now(make: Callable[[], Tensor] | None) -> FixedResult[Tensor] | None:
    """The same function, already evaluated; None for a gradient not yet available."""
    try:
        return None if make is None else FixedResult(make())
    except GradientError:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class CallValues:
    value: Callable[[], Tensor] | None = None
    """Makes the values for each flat_head, (flat_heads, S, E), if they were kept."""
    grad_output: Callable[[], Tensor] | None = None
    """Makes dL/dO for each flat_head, (flat_heads, T, E), if it was kept."""
    held: Callable[[], list[Tensor]] = list

    @classmethod
    def given(cls, value: Tensor) -> "CallValues":
        return cls(value=HeldValues.of(value))

    def __reduce__(self) -> tuple[object, ...]:
        """A copy (`copy`, `pickle`) has the current tensors, without a later gradient."""
        made = [read_now(make) for make in (self.value, self.grad_output)]
        return CallValues, (*made, FixedResult([one() for one in made if one is not None]))

    def with_value(self, value: Tensor) -> "CallValues":
        return CallValues(HeldValues.of(value), self.grad_output, self.held)

    def values_for(self, asked: str) -> Tensor:
        """The values (flat_heads, S, E)."""
        if self.value is None:
            raise ArgumentError(
                f"{asked} needs the values, which this map does not keep: map.with_values(value), "
                "attention(..., keep_values=True), or regard.watch(model, values=True)"
            )
        return self.value()

    def gradient_for(self, asked: str) -> Tensor:
        """The gradient of the output, (flat_heads, T, E)."""
        if self.grad_output is None:
            raise ArgumentError(
                f"{asked} needs the gradient of the output, dL/dO, which this map does not keep: hand it over, or "
                "regard.watch(model, values=True, gradients=True), and ask after backward()"
            )
        return self.grad_output()

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "CallValues":
        held = self.held
        return CallValues(
            _after(self.value, change), _after(self.grad_output, change), lambda: [change(one) for one in held()]
        )

    def choose(self, flat_heads: Tensor) -> "CallValues":
        def chosen(tensor: Tensor) -> Tensor:
            return tensor[flat_heads.to(tensor.device)]

        return CallValues(_after(self.value, chosen), _after(self.grad_output, chosen), self.held)


NOTHING = CallValues()


def of_heads(value: Tensor, heads: int) -> Tensor:
    """Values (B, G or H, S, E) for each flat_head, (B * H, S, E): heads of one key head share its values."""
    return repeated(value, heads).flatten(0, 1)


def widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _after(make: Callable[[], Tensor] | None, change: Callable[[Tensor], Tensor]) -> Callable[[], Tensor] | None:
    return None if make is None else lambda: change(make())
