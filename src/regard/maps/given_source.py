"""Weights that were given as a tensor, as the source of a map."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.maps.source import Part, Piece, Rows, Scratch, Source, take_rows


@dataclass(frozen=True, slots=True, eq=False)
class GivenSource(Source):
    """The weights of a tensor (cells, T, S), laid out as `layout`."""

    weights: Tensor
    layout: tuple[int, ...]
    """(batch..., H)."""

    @property
    def shape(self) -> torch.Size:
        """(batch..., H, T, S)."""
        return torch.Size((*self.layout, *self.weights.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """float32, or float64 for float64 weights."""
        return torch.promote_types(self.weights.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        """The tensor's."""
        return self.weights.device

    @property
    def has_signs(self) -> bool:
        """Whether a weight is below 0."""
        return bool((self.weights.detach() < 0).any())

    def tensors(self) -> list[Tensor]:
        """The weights."""
        return [self.weights]

    def __str__(self) -> str:
        return "given weights"

    def columns(self, rows: range) -> range:
        """All keys."""
        return range(self.keys)

    def part(self, cells: range, scratch: Scratch | None = None) -> Part:
        """The weights themselves."""
        weights = self.weights[cells.start : cells.stop]

        def block(rows: Rows, columns: Rows) -> Piece:
            return Piece(take_rows(take_rows(weights.mT, rows).mT, columns).to(self.dtype))

        return block

    def choose(self, cells: Tensor | None, leading: tuple[int, ...]) -> "GivenSource":
        """The weights of those cells."""
        return GivenSource(self.weights if cells is None else self.weights[cells], leading)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "GivenSource":
        """The weights, changed."""
        return replace(self, weights=change(self.weights))


def given(weights: Tensor) -> GivenSource:
    """The source of given weights (batch..., H, T, S).

    Raises:
        ShapeError: the tensor has fewer than two dimensions, or is not of floating point.
    """
    if weights.dim() < 2 or not weights.is_floating_point():
        raise ShapeError(
            f"weights are floating-point numbers of shape (..., T, S), got {tuple(weights.shape)} of {weights.dtype}"
        )
    return GivenSource(weights.reshape(-1, *weights.shape[-2:]), tuple(weights.shape[:-2]))
