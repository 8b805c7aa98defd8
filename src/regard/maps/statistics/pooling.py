"""Maps as pictures: a grid of blocks of nearly equal size, each reduced to one element."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.maps.indexing import is_integer


@dataclass(frozen=True, slots=True)
class Bins:
    """`count` bins over `length` places; the first length % count bins have one place more, as in `torch.tensor_split`.

    >>> bins = Bins(7, 3)
    >>> [bins.edge(b) for b in range(4)]
    [0, 3, 5, 7]
    """

    length: int
    count: int

    @classmethod
    def at_most(cls, count: int, length: int, name: str) -> "Bins":
        if not is_integer(count) or count < 1:
            raise ArgumentError(f"pooled() needs at least 1 bin of {name}, a whole number, got {count!r}")
        return cls(length, min(int(count), length))

    @property
    def largest(self) -> int:
        return -(-self.length // self.count)

    def ranges(self) -> list[range]:
        edges = [self.edge(index) for index in range(self.count + 1)]
        return [range(start, stop) for start, stop in pairwise(edges)]

    def edge(self, index: int) -> int:
        size, extra = divmod(self.length, self.count)
        return index * size + min(index, extra)

    def index_of(self, place: int) -> int:
        size, extra = divmod(self.length, self.count)
        big = extra * (size + 1)
        return place // (size + 1) if place < big else extra + (place - big) // size

    def sizes(self, device: torch.device) -> Tensor:
        size, extra = divmod(self.length, self.count)
        return size + (torch.arange(self.count, device=device) < extra).long()

    def owners(self, device: torch.device) -> Tensor:
        return torch.arange(self.count, device=device).repeat_interleave(self.sizes(device), output_size=self.length)

    def reduce(self, tensor: Tensor, dim: int, start: int, *, largest: bool) -> tuple[Tensor, int]:
        """Sums or maxima of each bin, of places from `start` on, along a negative `dim`; and the first bin."""
        stop, first, pieces = start + tensor.shape[dim], self.index_of(start), []
        at, index, extra = start, first, self.length % self.count
        while at < stop:
            begin, end = self.edge(index), self.edge(index + 1)
            if at > begin or end > stop:
                size, count = min(end, stop) - at, 1
            else:
                size = end - begin
                count = min((extra if index < extra else self.count) - index, (stop - at) // size)
            part = tensor.narrow(dim, at - start, size * count)
            pieces.append(_largest(part, dim, size) if largest else _sums(part, dim, size))
            at, index = at + size * count, index + count
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim), first


@dataclass(frozen=True, slots=True)
class Grid:
    """The blocks of a map: bins of queries by bins of keys.

    >>> grid = Grid.at_most(512, 512, 513, 300)
    >>> grid.rows.count, grid.columns.count, grid.rows.largest, grid.is_whole
    (512, 300, 2, False)
    """

    rows: Bins
    columns: Bins

    @classmethod
    def at_most(cls, rows: int, columns: int, queries: int, keys: int) -> "Grid":
        """As many blocks as asked, each with at least one query and one key.

        Raises:
            ArgumentError: fewer than 1 row or column is asked.
        """
        return cls(Bins.at_most(rows, queries, "queries"), Bins.at_most(columns, keys, "keys"))

    @property
    def is_whole(self) -> bool:
        """Whether every block is a single weight: then its sum, its mean and its largest weight are equal."""
        return self.rows.largest == self.columns.largest == 1

    def is_within(self, other: "Grid") -> bool:
        """Whether it has no more rows and columns than another grid of the same map."""
        return self.rows.count <= other.rows.count and self.columns.count <= other.columns.count

    def areas(self, device: torch.device) -> Tensor:
        """How many weights each block has: (rows, columns)."""
        return self.rows.sizes(device)[:, None] * self.columns.sizes(device)

    def reduce(self, weights: Tensor, row: int, column: int, *, largest: bool) -> Tensor:
        """Sums or maxima of the blocks of weights (..., t, s), with the first weight at (`row`, `column`)."""
        # Rows first, to save memory.
        by_rows, _ = self.rows.reduce(weights, -2, row, largest=largest)
        return self.columns.reduce(by_rows, -1, column, largest=largest)[0]


def _largest(part: Tensor, dim: int, size: int) -> Tensor:
    """The maximum of every `size` neighbours; `amax` alone is slow along a short last dimension."""
    if dim == -1 and size < 32:
        return torch.nn.functional.max_pool1d(part, size)
    return part.unflatten(dim, (-1, size)).amax(dim)


def _sums(part: Tensor, dim: int, size: int) -> Tensor:
    """The sum of every `size` neighbours; `sum` alone is slow along a short last dimension."""
    part = part.unflatten(dim, (-1, size))
    if dim == -1 and 4 <= size < 32:
        return part @ part.new_ones(size)
    return part.sum(dim)
