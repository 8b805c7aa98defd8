"""The weights of a map: its shape, blocks, rows and single weights."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.call.shapes import Rows, without_autocast
from regard.errors import ShapeError, TooLargeError
from regard.maps.indexing import is_integer, positions
from regard.maps.sources.call import source_of_call
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

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def dense_bytes(self) -> int:
        """The bytes that `dense()` would allocate."""
        return math.prod(self.shape) * self.dtype.itemsize

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

    def at(self, rows: Tensor, columns: Tensor, *, leading: Sequence[Tensor] | None = None) -> Tensor:
        """The single weights P[..., rows[n], columns[n]], shape (batch..., H, N), in memory linear in N.

        Args:
            rows: N queries.
            columns: their N keys.
            leading: an index tensor (N,) for each dimension before the queries: the answer is then the weights
                P[leading[0][n], ..., rows[n], columns[n]], shape (N,).

        Raises:
            ShapeError: the indices are not 1-D index tensors of one length, one of `leading` for each dimension, or
                out of range.

        >>> import regard
        >>> weights = regard.attention(*[torch.eye(3)] * 3, return_weights=True).weights
        >>> weights.at(torch.tensor([0, 1]), torch.tensor([0, 2]))
        tensor([0.4711, 0.2645])
        >>> weights = regard.attention(*[torch.eye(3).expand(2, 3, 3)] * 3, return_weights=True).weights
        >>> weights.at(torch.tensor([0, 1]), torch.tensor([0, 2]), leading=[torch.tensor([1, 0])])
        tensor([0.4711, 0.2645])
        """
        given = (*(leading or ()), rows, columns)
        lengths = (*(self.source.leading if leading is not None else ()), *self.shape[-2:])
        names = (*("leading" for _ in leading or ()), "query", "key")
        fits = len(given) == len(lengths)
        found = [positions(*one, self.device) for one in zip(given, lengths, names, strict=True)] if fits else []
        places = [one for one in found if isinstance(one, Tensor)]
        if len(places) != len(given) or len({len(one) for one in places}) > 1:
            raise ShapeError(
                f"at() takes 1-D index tensors of one length, for queries and keys and, with leading, for each of the "
                f"dimensions {self.source.leading} before them; got {', '.join(str(tuple(one.shape)) for one in given)}"
            )
        if leading is None:
            with without_autocast(self.device):
                return self.source.laid_out(self.source.pairs(*places))
        flat_heads = torch.zeros_like(places[-1])
        for place, length in zip(places, self.source.leading, strict=False):
            flat_heads = flat_heads * length + place
        with without_autocast(self.device):
            return self.source.points(flat_heads, *places[-2:])

    def row(self, index: int, *, renormalize: bool = False) -> Tensor:
        """The weights of one query, (batch..., H, S).

        Args:
            index: the query; a negative one counts from the end.
            renormalize: normalise the row's scores anew, without the stored row state. In float32, with scores of about
                100, rounding of the log-sum-exp gives every weight of the row a relative error of up to 2e-5;
                normalising anew removes it.

        Raises:
            ShapeError: the index is out of range, or no integer.
            ArgumentError: with `renormalize`, the map is not from one call.

        >>> import regard
        >>> regard.attention(*[torch.eye(3)] * 3, return_weights=True).weights.row(-1, renormalize=True)
        tensor([0.2645, 0.2645, 0.4711])
        """
        if not is_integer(index):
            raise ShapeError(f"row() takes one query, an integer; only(rows=...) takes several; got {index!r}")
        where = positions(index, self.shape[-2], "query", self.device)
        if not renormalize:
            return self.block(where, range(self.shape[-1]))[..., 0, :]
        source = source_of_call(self.source, "row(renormalize=True)")
        with without_autocast(self.device):
            return source.laid_out(source.row_anew(where))


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
