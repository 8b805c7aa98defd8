"""The cells of an image: squares of its pixels, in rows and columns, of one tile or of the tiles of a mosaic.

Models of images and texts cut an image into tiles: LLaVA-NeXT, Idefics3, InternVL.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
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


Pixels = npt.NDArray[np.float64]
"""(height, width, 3) in 0..1."""
MOST_UNLIKE = 0.15
"""The mean difference in colour above which tiles are no parts of their overview."""


@dataclass(frozen=True, slots=True)
class Mosaic:
    pixels: Pixels
    rows: int
    columns: int
    whole: int
    """The place of the overview among the tiles: the first or the last; the others are in row-major order."""

    def keys(self, at: Sequence[int], patch: int) -> tuple[Pixels, list[int], ImageCells] | None:
        """The image that a model has tokens of, and these in row-major order; None if their number is of no such form.

        Either each tile has as many tokens, or the overview has those of its patches and the others are the rows of
        the image, padding cut off, with a token at the end of each (LLaVA-NeXT).
        """
        tiles = self.rows * self.columns + 1
        height, width = self.pixels.shape[0] // self.rows, self.pixels.shape[1] // self.columns
        each, rest = divmod(len(at), tiles)
        side = round(each**0.5)
        if not rest and side**2 == each and height == width:
            places = np.delete(np.asarray(at).reshape(tiles, side, side), self.whole, 0)
            grid = places.reshape(self.rows, self.columns, side, side).swapaxes(1, 2)
            return self.pixels, grid.ravel().tolist(), ImageCells(self.rows * side, self.columns * side, self._tiles())
        down, across = height // patch, width // patch
        tall, wide = self.rows * down, self.columns * across
        count = len(at) - down * across
        for rows, columns in ((tall, count // tall - 1), (count // (wide + 1), wide)):
            cut = (tall - rows, wide - columns)
            if rows * (columns + 1) == count and min(cut) >= 0 and not any(one % 2 for one in cut):
                top, left = (one // 2 * patch for one in cut)
                pixels = self.pixels[top : top + rows * patch, left : left + columns * patch]
                grid = np.asarray(at)[down * across :].reshape(rows, columns + 1)[:, :-1]
                cells = ImageCells(rows, columns, self._tiles(), top, left, rows * patch, columns * patch)
                return pixels, grid.ravel().tolist(), cells
        return None

    def _tiles(self) -> tuple[tuple[int, ...], ...]:
        numbers = [n for n in range(self.rows * self.columns + 1) if n != self.whole]
        return tuple(tuple(numbers[row * self.columns :][: self.columns]) for row in range(self.rows))


def mosaic(tiles: Pixels, size: tuple[int, int]) -> Mosaic | None:
    """Find how tiles (N, height, width, 3) make up an image of this height and width; None for no image.

    The tiles are laid out in every way, and compared with the first or the last of them, which shows the whole image.
    Where two are alike (an image of one colour), the one nearest to the image's proportions is taken.
    """
    found: list[tuple[float, float, int, Mosaic]] = []
    for whole in (0, len(tiles) - 1):
        others = np.delete(tiles, whole, 0)
        for rows in (n for n in range(1, len(others) + 1) if len(others) % n == 0):
            columns = len(others) // rows
            pixels = others.reshape(rows, columns, *tiles.shape[1:]).swapaxes(1, 2).reshape(
                rows * tiles.shape[1], columns * tiles.shape[2], 3
            )  # fmt: skip
            unlike = min(np.abs(_small(one) - _small(tiles[whole])).mean() for one in _contents(pixels, size))
            ratio = abs(np.log(pixels.shape[0] * size[1] / (pixels.shape[1] * size[0])))
            found.append((round(float(unlike), 2), ratio, len(found), Mosaic(pixels, rows, columns, whole)))
    best = min(found)
    return best[-1] if best[0] <= MOST_UNLIKE else None


def _contents(pixels: Pixels, size: tuple[int, int]) -> Iterator[Pixels]:
    yield pixels
    height, width = pixels.shape[:2]
    scale = min(height / size[0], width / size[1])
    down, across = (max(1, round(one * scale)) for one in size)
    top, left = (height - down) // 2, (width - across) // 2
    yield pixels[top : top + down, left : left + across]


def _small(pixels: Pixels) -> Any:
    """16 x 16 means."""
    rows, columns = (np.linspace(0, n, 17).astype(int)[:-1] for n in pixels.shape[:2])
    sums = np.add.reduceat(np.add.reduceat(pixels, rows, 0), columns, 1)
    counts = np.add.reduceat(np.add.reduceat(np.ones(pixels.shape[:2]), rows, 0), columns, 1)
    return sums / counts[..., None]
