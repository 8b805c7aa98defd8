"""Weights T x S computed by the model, saved unchanged and read like every other map."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from torch import Tensor

from regard.call.shapes import UNNAMED, Dimensions
from regard.errors import ArgumentError
from regard.maps.sources.combined import ScaledSource
from regard.maps.sources.given import TensorSource
from regard.maps.sources.values import read_now, widened
from regard.tensors.fresh import Fresh


@dataclass(frozen=True, slots=True, eq=False)
class StoredSource(TensorSource):
    """The weights (batch..., H, T, S) of a tensor the model made. They may be negative, and need not sum to 1."""

    held: Tensor
    """(flat_heads, T, S)."""
    fresh: Fresh
    layout: tuple[int, ...]
    """(batch..., H)."""
    name: str
    names: Dimensions
    received: Callable[[], Tensor] | None = None
    """Gives the gradient of the weights (flat_heads, T, S), if a watch waits for it."""

    def __reduce__(self) -> tuple[object, ...]:
        parts = (self.weights, self.fresh, self.layout, self.name, self.names, read_now(self.received))
        return StoredSource, parts

    @property
    def tensor(self) -> Tensor:
        return self.held

    def __str__(self) -> str:
        return self.name

    def refuse(self, asked: str) -> NoReturn:
        """Raise ArgumentError: there are weights, without queries and keys."""
        raise ArgumentError(
            f"{asked} needs the queries and keys of a call, and of {self} the weights alone were kept: dense() gives "
            "them as a tensor"
        )

    def gradient(self, grad_output: Tensor | None) -> "StoredSource":
        received = self._received("gradient()", grad_output)
        fresh = Fresh(gradient_of_the_weights=received)
        return replace(self, held=received, fresh=fresh, name=f"gradient of {self.name}", received=None)

    def attribution(self, grad_output: Tensor | None) -> ScaledSource:
        received = widened(self._received("attribution()", grad_output))
        return ScaledSource(self.mapped(Tensor.detach), received)

    def _received(self, asked: str, grad_output: Tensor | None) -> Tensor:
        if grad_output is not None:
            self.refuse(f"{asked} for a given gradient of the output")
        if self.received is None:
            raise ArgumentError(
                f"{asked} needs the gradient of the weights, which was not kept: regard.watch(model, values=True, "
                "gradients=True), and ask after backward()"
            )
        return self.received()

    def choose(self, flat_heads: Tensor | None, leading: tuple[int, ...]) -> "StoredSource":
        names = Dimensions.unknown(len(leading), UNNAMED)
        if flat_heads is None:
            return replace(self, layout=leading, names=names)
        chosen, received = self.weights[flat_heads], _then(self.received, lambda t: t[flat_heads])
        return replace(self, held=chosen, fresh=Fresh(weights=chosen), layout=leading, names=names, received=received)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "StoredSource":
        made = change(self.weights)
        return replace(self, held=made, fresh=Fresh(weights=made), received=_then(self.received, change))


def _then(make: Callable[[], Tensor] | None, change: Callable[[Tensor], Tensor]) -> Callable[[], Tensor] | None:
    return None if make is None else lambda: change(make())


def stored(
    weights: Tensor, fresh: Fresh, name: str, dimensions: Dimensions, received: Callable[[], Tensor] | None = None
) -> StoredSource:  # fmt: skip
    """The source of saved weights (batch..., H, T, S), (batch, T, S) or (T, S), with their gradient in that layout."""
    layout = tuple(weights.shape[:-2])
    flat_heads = weights.reshape(-1, *weights.shape[-2:])
    if flat_heads.untyped_storage().data_ptr() != weights.untyped_storage().data_ptr():
        fresh = Fresh()  # A reshaped copy has memory of its own.
        fresh.own("weights", flat_heads)
    back = _then(received, lambda gradient: gradient.reshape(flat_heads.shape))
    return StoredSource(flat_heads, fresh, layout, name, dimensions, back)
