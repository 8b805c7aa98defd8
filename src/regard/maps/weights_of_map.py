"""The weights of a map: its shape, blocks, rows and single weights."""

import math
from typing import Any

import torch
from torch import Tensor

from regard.call.shapes import Rows, without_autocast
from regard.errors import ShapeError, TooLargeError
from regard.maps.indexing import positions
from regard.maps.sources.source import Source
from regard.tensors.memory import human

DENSE_LIMIT_BYTES = 2**30
"""The default limit of a block of weights."""


class MapWeights:
    def __init__(self, source: Source) -> None:
        self.source = source

    @property
    def shape(self) -> torch.Size:
        """(batch..., H, T, S)."""
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all answers: float32, or float64 for float64 input, unless `to` changed it."""
        return self.source.answer_dtype

    @property
    def device(self) -> torch.device:
        """The device of the factors."""
        return self.source.device

    @property
    def leading(self) -> tuple[int, ...]:
        """(batch..., H): the dimensions before queries and keys."""
        return tuple(self.shape[:-2])

    def __len__(self) -> int:
        return self.shape[0]

    def block(self, rows: Rows, columns: Rows, *, limit_bytes: int = DENSE_LIMIT_BYTES) -> Tensor:
        """The weights of some queries and keys, (batch..., H, t, s): the outer block of the two.

        Args:
            rows: a range of queries, or a 1-D tensor of them; negative ones of a tensor count from the end.
            columns: the same for keys.
            limit_bytes: the most bytes of the block.

        Raises:
            ShapeError: a query or a key is out of range.
            TooLargeError: the block would take more than `limit_bytes`.
            NotKeptError: the map has statistics only.
        """
        source, dtype, (*leading, queries, keys) = self.source, self.dtype, self.shape
        if not source.has_blocks:
            source.refuse("a block of weights")
        rows = rows if isinstance(rows, range) else positions(rows, queries, "query", self.device)
        columns = columns if isinstance(columns, range) else positions(columns, keys, "key", self.device)
        for name, asked, length in (("queries", rows, queries), ("keys", columns, keys)):
            if isinstance(asked, range) and (asked.step != 1 or asked.start < 0 or asked.stop > length):
                raise ShapeError(f"a block takes a range of {name} by ones within 0 and {length}, got {asked}")
        cost = math.prod(leading) * len(rows) * len(columns) * dtype.itemsize
        if cost > limit_bytes:
            raise TooLargeError(
                f"{len(rows)} x {len(columns)} weights of a map {tuple(self.shape)} take {human(cost)}, above the "
                f"limit of {human(limit_bytes)}: read fewer rows at a time, or call block() or dense() with a "
                "higher limit_bytes"
            )
        with without_autocast(self.device):
            weights = source.part(range(math.prod(leading)))(rows, columns).weights
        return weights.to(dtype).reshape(*leading, len(rows), len(columns))

    def dense(self, limit_bytes: int = DENSE_LIMIT_BYTES) -> Tensor:
        """All of P as a tensor of shape (batch..., H, T, S).

        Raises:
            TooLargeError: it would take more than `limit_bytes`.
        """
        *_, queries, keys = self.shape
        return self.block(range(queries), range(keys), limit_bytes=limit_bytes)


def row_at(source: Source, index: tuple[Any, ...]) -> Tensor | None:
    """The weights of one query, or one of them, where each dimension before the keys has an integer; else None."""
    place, number, shape = 0, len(index), source.shape
    if not len(shape) - 1 <= number <= len(shape) or not source.has_blocks:
        return None
    for at, length in zip(index, shape, strict=False):
        if type(at) is not int or not -length <= at < length:
            return None
        place = place * length + at % length
    queries, keys = shape[-2:]
    place, column = (place, slice(None)) if number < len(shape) else divmod(place, keys)
    flat_head, row = divmod(place, queries)
    with without_autocast(source.device):
        weights = source.part(range(flat_head, flat_head + 1))(range(row, row + 1), range(keys)).weights
    return weights[0, 0, column].to(source.answer_dtype)
