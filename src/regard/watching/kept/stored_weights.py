"""Weights T x S computed by the model, saved unchanged and read like every other map."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from torch import Tensor

from regard.errors import ArgumentError
from regard.maps.sources.combined import ScaledSource
from regard.maps.sources.given import TensorSource
from regard.maps.sources.values import read_now, widened
from regard.watching.kept.saved_tensor import SavedTensor


@dataclass(frozen=True, slots=True, eq=False)
class StoredSource(TensorSource):
    """The weights (batch..., H, T, S) of a tensor the model made. They may be negative, and need not sum to 1."""

    held: SavedTensor
    layout: tuple[int, ...]
    """(batch..., H)."""
    name: str
    is_with_heads: bool
    mixed: str = ""
    """Why the rows of the batch are sequences and heads in an unknown order; empty if they are sequences."""
    received: Callable[[], Tensor] | None = None
    """Gives the gradient of the weights (flat_heads, T, S), if a watch waits for it."""

    def __reduce__(self) -> tuple[object, ...]:
        parts = (self.held, self.layout, self.name, self.is_with_heads, self.mixed, read_now(self.received))
        return StoredSource, parts

    @property
    def tensor(self) -> Tensor:
        return self.held.tensor

    @property
    def weights(self) -> Tensor:
        """The weights (flat_heads, T, S); raises OverwrittenError if the model has written to them."""
        self.held.check()
        return self.held.tensor

    @property
    def has_heads(self) -> bool:
        return self.is_with_heads

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
        return replace(self, held=SavedTensor(received, self.held.what), name=f"gradient of {self.name}", received=None)

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
        mixed = self.mixed if leading else ""
        if flat_heads is None:
            return replace(self, layout=leading, mixed=mixed)
        held = SavedTensor(self.weights[flat_heads], self.held.what)
        return replace(
            self, held=held, layout=leading, mixed=mixed, received=_then(self.received, lambda t: t[flat_heads])
        )

    def told_heads(self, has_heads: bool) -> "StoredSource":
        return replace(self, is_with_heads=has_heads)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "StoredSource":
        held = SavedTensor(change(self.weights), self.held.what)
        return replace(self, held=held, received=_then(self.received, change))


def _then(make: Callable[[], Tensor] | None, change: Callable[[Tensor], Tensor]) -> Callable[[], Tensor] | None:
    return None if make is None else lambda: change(make())


def stored(
    weights: SavedTensor, name: str, mixed: str = "", received: Callable[[], Tensor] | None = None
) -> StoredSource:  # fmt: skip
    """The source of saved weights (batch..., H, T, S), (batch, T, S) or (T, S), with their gradient in that layout."""
    layout = tuple(weights.tensor.shape[:-2])
    flat_heads = weights.tensor.reshape(-1, *weights.tensor.shape[-2:])
    # A reshaped copy has memory of its own, and a view has the version of its tensor.
    is_copy = flat_heads.untyped_storage().data_ptr() != weights.tensor.untyped_storage().data_ptr()
    return StoredSource(
        SavedTensor(flat_heads, weights.what, None if is_copy else weights.mark), layout, name, len(layout) > 1,
        mixed,
        _then(received, lambda gradient: gradient.reshape(flat_heads.shape)),
    )  # fmt: skip
