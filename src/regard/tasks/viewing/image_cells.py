"""The cells of an image: squares of its pixels, in rows and columns, of one tile or of the tiles of a mosaic."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ImageCells:
    rows: int
    columns: int
    tiles: tuple[tuple[int, ...], ...]
    """The numbers of the tiles among those of the input, in rows and columns."""
    top: int = 0
    left: int = 0
    height: int = 0
    """In pixels, from `top` on; 0 for all of the tiles."""
    width: int = 0

    def each(self) -> Iterator[tuple[int, int]]:
        return ((row, column) for row in range(self.rows) for column in range(self.columns))

    def mask(self, shape: Sequence[int], chosen: Container[tuple[int, int]]) -> Tensor:
        """Which pixels of the input (..., channels, height, width) are in chosen cells."""
        high, wide = shape[-2:]
        whole = torch.zeros(len(self.tiles) * high, len(self.tiles[0]) * wide, dtype=torch.bool)
        height, width = self.height or whole.shape[0], self.width or whole.shape[1]
        for row, column in self.each():
            if (row, column) in chosen:
                y, bottom = (self.top + n * height // self.rows for n in (row, row + 1))
                x, right = (self.left + n * width // self.columns for n in (column, column + 1))
                whole[y:bottom, x:right] = True
        found = torch.zeros(*shape, dtype=torch.bool)
        tiles = found.view(-1, *shape[-3:])
        for down, numbers in enumerate(self.tiles):
            for across, number in enumerate(numbers):
                tiles[number] = whole[down * high : (down + 1) * high, across * wide : (across + 1) * wide]
        return found
