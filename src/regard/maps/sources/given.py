"""Weights in a tensor, as the source of a map."""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regard.call.shapes import Dimensions, Rows, take_rows
from regard.errors import ShapeError
from regard.maps.sources.source import NamedSource, Part, Piece, Scratch
from regard.tensors.fresh import Fresh


class TensorSource(NamedSource):
    """A source with its weights in a tensor. They may be negative, and need not sum to 1."""

    layout: tuple[int, ...]
    """(batch..., H)."""
    fresh: Fresh
    """The tensor, as it was."""

    @property
    @abstractmethod
    def tensor(self) -> Tensor:
        """The tensor (flat_heads, T, S), for sizes and indices."""

    @property
    def weights(self) -> Tensor:
        """The weights (flat_heads, T, S); raises OverwrittenError if others have written to them."""
        self.fresh.check()
        return self.tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.layout, *self.tensor.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.tensor.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def has_signs(self) -> bool:
        return self.tensor.numel() > 0 and bool(self.weights.detach().min() < 0)

    def tensors(self) -> list[Tensor]:
        return [self.tensor]

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        weights = self.weights[flat_heads.start : flat_heads.stop]

        def block(rows: Rows, columns: Rows) -> Piece:
            return Piece(take_rows(take_rows(weights.mT, rows).mT, columns).to(self.dtype))

        return block

    def pairs(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.weights[:, rows, columns].to(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class GivenSource(TensorSource):
    given: Tensor
    layout: tuple[int, ...]
    names: Dimensions
    fresh: Fresh = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fresh", Fresh(weights=self.given))

    @property
    def tensor(self) -> Tensor:
        return self.given

    def __str__(self) -> str:
        return "given weights"

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "GivenSource":
        return replace(self, given=change(self.weights))


def given_weights(weights: Tensor) -> GivenSource:
    """The source of given weights (batch..., H, T, S)."""
    if weights.dim() < 2 or not weights.is_floating_point():
        raise ShapeError(
            f"weights are floating-point numbers of shape (..., T, S), got {tuple(weights.shape)} of {weights.dtype}"
        )
    layout = tuple(weights.shape[:-2])
    names = Dimensions.of_call(max(len(layout) - 1, 0), has_heads=bool(layout))
    return GivenSource(weights.reshape(math.prod(layout), *weights.shape[-2:]), layout, names)
