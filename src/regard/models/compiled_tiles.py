"""Compiled layers whose many rows are multiplied as tiles: memory for the rows, and the parts of the matrices.

See `regard.compiled.tile_code` for what a tile and a part is.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.compiled.step_work import CUT, PAIRS, PRODUCT, TILE_DEPTH, TILE_ROWS


def has_tiles(most_rows: int) -> bool:
    """Whether layers for up to so many rows may multiply them as tiles."""
    from regard.compiled.tile_code import HAS_TILES

    return HAS_TILES and most_rows >= TILE_ROWS


class Tiles:
    """Tiles for layers, made when there are so many rows for the first time.

    Args:
        stages: the layers, in which a CUT stands before each PRODUCT if there are tiles.
        panels: the matrix of each product.
        most_rows: of the layers.
    """

    def __init__(self, stages: Any, panels: Sequence[Tensor], most_rows: int) -> None:
        self._stages, self._panels, self._most_rows = stages, list(panels), most_rows
        self._kept = list[Tensor]()

    def make_ready(self, rows: int) -> None:
        """Tell the stages where their tiles are, if so many rows are multiplied as tiles."""
        if self._kept or rows < TILE_ROWS or not has_tiles(self._most_rows):
            return
        products, cuts = (np.flatnonzero(self._stages["kind"] == kind) for kind in (PRODUCT, CUT))
        for place, panels in zip(products, self._panels, strict=True):
            is_whole = self._stages["kept"][place] != PAIRS
            tiles = tiles_of(panels) if is_whole else panels
            self._kept.append(tiles)
            self._stages["tiles"][place] = tiles.data_ptr()
            self._stages["parts"][place] = tiles.shape[2] if is_whole else 1
        self._stages["parts"][cuts] = self._stages["parts"][products]
        numbers = -(-self._stages["inputs"][products] // TILE_DEPTH) * TILE_DEPTH * self._stages["parts"][products]
        rows_of_tiles = -(-self._most_rows // TILE_ROWS) * TILE_ROWS
        cut = torch.zeros(rows_of_tiles, int(numbers.max()), dtype=torch.bfloat16, device="cpu")
        self._kept.append(cut)
        self._stages["cut"][products] = self._stages["target"][cuts] = cut.data_ptr()


def tiles_of(panels: Tensor) -> Tensor:
    """Panels of float32 (panels, inputs, PANEL, 1) as the parts of their numbers, in pairs.

    Returns:
        (panels, inputs / TILE_DEPTH, parts, TILE_DEPTH / 2, PANEL, 2) in bfloat16, with zeros in the last block.
    """
    from regard.compiled.tile_code import WHOLE_PARTS

    count, inputs, columns, _ = panels.shape
    rest, parts = torch.nn.functional.pad(panels[..., 0], (0, 0, 0, -inputs % TILE_DEPTH)), list[Tensor]()
    for _ in range(WHOLE_PARTS):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    blocks = torch.stack(parts).view(WHOLE_PARTS, count, -1, TILE_DEPTH // 2, 2, columns)
    return blocks.permute(1, 2, 0, 3, 5, 4).contiguous()
