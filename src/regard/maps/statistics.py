"""What can be said of a map, each statistic as it is read off tiles of weights.

Those that are smooth carry gradients. Rows with no key are exactly 0 in all of them.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.backends.tiled import Tile
from regard.maps.bins import Bins
from regard.maps.tiles import Piece, Source, Statistic

LOWEST_LOG = -1e4
"""Stands for the logarithm of a weight that is 0 in every dtype, since 0 times -inf would be NaN."""
CHUNK = 16
"""Keys whose largest weight is looked at first, where the k largest are sought."""
SORTED = 64
"""Keys that are sorted first, where a share of the mass is sought: most rows need no more."""


class TopK(NamedTuple):
    """The k largest weights of each query, from the largest down, and the keys that have them."""

    values: Tensor
    """(batch..., H, T, k)."""
    indices: Tensor
    """(batch..., H, T, k); -1 where no more keys have a weight."""


class PerQuery(Statistic):
    """One answer for each query; tiles are put together along the rows."""

    def add(
        self, total: list[tuple[Tensor, ...]] | None, read: tuple[Tensor, ...], tile: Tile, source: Source
    ) -> list[tuple[Tensor, ...]]:
        """The tiles so far."""
        return [*(total or ()), read]

    def end(self, total: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The tiles, put together."""
        return tuple(torch.cat(pieces, dim=1) for pieces in zip(*total, strict=True))


class PerKey(Statistic):
    """A sum over queries for each key, (cells, ..., S) with the keys last."""

    @abstractmethod
    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        """The sum over a tile's rows, (cells, ..., s)."""

    def add(self, total: Tensor | None, read: tuple[Tensor, ...], tile: Tile, source: Source) -> Tensor:
        """The sum so far, over all keys."""
        (sums,), columns = read, tile.columns
        if len(columns) < source.keys:
            sums = torch.nn.functional.pad(sums, (columns.start, source.keys - columns.stop))
        return sums if total is None else total + sums

    def end(self, total: Tensor) -> tuple[Tensor]:
        """The sum."""
        return (total,)


@dataclass(frozen=True, slots=True)
class Received(PerKey):
    """sum_i P_ij: (cells, S)."""

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        """The sum of each column."""
        return (piece.weights.sum(1),)


@dataclass(frozen=True, slots=True, eq=False)
class TransposedProduct(PerKey):
    """P^T x for x (cells or 1, T, N), as (cells, N, S)."""

    x: Tensor

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        """x^T P of the tile's rows."""
        x = self.x if len(self.x) == 1 else self.x[_slice(tile.cells)]
        return (x[:, _slice(tile.rows)].mT @ piece.weights,)


@dataclass(frozen=True, slots=True, eq=False)
class Product(PerQuery):
    """P x for x (cells or 1, S, N): (cells, T, N)."""

    x: Tensor

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        """The product with the tile's columns of P."""
        x = self.x if len(self.x) == 1 else self.x[_slice(tile.cells)]
        return (piece.weights @ x[:, _slice(tile.columns)],)


@dataclass(frozen=True, slots=True)
class Entropy(PerQuery):
    """-sum_j P_ij ln P_ij: (cells, T)."""

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        """From the logarithms, where there are any."""
        weights = piece.weights
        if piece.logs is not None:
            if piece.is_scratch:
                return (piece.logs.clamp_min_(LOWEST_LOG).mul_(weights).sum(-1).neg_(),)
            return (-torch.linalg.vecdot(weights, piece.logs.clamp_min(LOWEST_LOG)),)
        positive = weights > 0
        return (-(weights * torch.where(positive, weights, 1.0).log()).sum(-1),)


@dataclass(frozen=True, slots=True)
class Moments(PerQuery):
    """sum_j P_ij and sum_j P_ij^2: (cells, T) each."""

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor, Tensor]:
        """Both sums."""
        return piece.weights.sum(-1), torch.linalg.vecdot(piece.weights, piece.weights)


@dataclass(frozen=True, slots=True)
class Largest(PerQuery):
    """max_j P_ij: (cells, T)."""

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        """The largest of each row."""
        return (piece.weights.amax(-1),)


@dataclass(frozen=True, slots=True)
class ArgLargest(PerQuery):
    """The first key that has the largest weight, -1 for a row of zeros: (cells, T)."""

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        """The key."""
        values, indices = piece.weights.detach().max(-1)
        return (torch.where(values != 0, indices + tile.columns.start, -1),)


@dataclass(frozen=True, slots=True)
class TopWeights(PerQuery):
    """The k largest weights and their keys: (cells, T, k) each. See `TopK`."""

    k: int

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor, Tensor]:
        """Exact: the k largest stand in the k chunks whose largest are largest."""
        weights, missing = piece.weights, max(0, self.k - piece.weights.shape[-1])
        values, indices = largest(weights, self.k - missing)
        values, indices = (torch.nn.functional.pad(t, (0, missing)) for t in (values, indices))
        return values, torch.where(values != 0, indices + tile.columns.start, -1)


@dataclass(frozen=True, slots=True)
class QuantileMass(PerQuery):
    """The fewest keys that hold the share p of the row's mass: (cells, T) of int64."""

    share: float

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        """The largest few first; rows that need more are sorted whole."""
        weights = piece.weights.detach()
        goal = self.share * weights.sum(-1, keepdim=True)
        few = min(SORTED, weights.shape[-1])
        mass = largest(weights, few)[0].cumsum(-1)
        count = (mass < goal).sum(-1) + 1
        more = count > few
        if few < weights.shape[-1] and bool(more.any()):
            ordered = weights[more].sort(-1, descending=True).values
            count[more] = (ordered.cumsum(-1) < goal[more]).sum(-1) + 1
        # The sum of a row in another order may miss its own total by a rounding.
        return (torch.where(goal[..., 0] > 0, count.clamp_max((weights > 0).sum(-1)), 0),)


@dataclass(frozen=True, slots=True)
class Distance(PerQuery):
    """sum_j P_ij |i + offset - j|: (cells, T)."""

    offset: int

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        """The weighted sum of the tile's distances."""
        device, dtype = piece.weights.device, piece.weights.dtype
        i = torch.arange(tile.rows.start, tile.rows.stop, device=device) + self.offset
        j = torch.arange(tile.columns.start, tile.columns.stop, device=device)
        return (torch.linalg.vecdot(piece.weights, (i[:, None] - j).abs().to(dtype)),)


@dataclass(frozen=True, slots=True)
class Pooled(Statistic):
    """The sum, or the largest weight, of each block of a grid: (cells, rows, columns)."""

    rows: Bins
    columns: Bins
    is_max: bool

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        """The bins that the tile touches; rows first, which is the cheaper way in memory."""
        by_rows, _ = self.rows.reduce(piece.weights, -2, tile.rows.start, largest=self.is_max)
        return (self.columns.reduce(by_rows, -1, tile.columns.start, largest=self.is_max)[0],)

    def add(self, total: Tensor | None, read: tuple[Tensor, ...], tile: Tile, source: Source) -> Tensor:
        """The picture so far."""
        (part,) = read
        if total is None:
            start = -torch.inf if self.is_max else 0.0
            total = part.new_full((len(part), self.rows.count, self.columns.count), start)
        row, column = self.rows.index_of(tile.rows.start), self.columns.index_of(tile.columns.start)
        where = total[:, row : row + part.shape[1], column : column + part.shape[2]]
        if self.is_max:
            part = torch.maximum(where, part)
            total[:, row : row + part.shape[1], column : column + part.shape[2]] = part
        else:
            where += part
        return total

    def end(self, total: Tensor) -> tuple[Tensor]:
        """The picture; what no tile touched is 0."""
        return (total.masked_fill(total == -torch.inf, 0.0) if self.is_max else total,)


TILES_ONLY = (Largest, ArgLargest, TopWeights, QuantileMass, Pooled)
"""What no product with the map can tell."""


def largest(weights: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`weights.topk(k)` along the last dimension, sooner where the rows are long."""
    chunks = weights.shape[-1] // CHUNK
    if chunks < 2 * k:
        values, indices = weights.topk(k)
        return values, indices
    whole = chunks * CHUNK
    chosen = weights[..., :whole].detach().unflatten(-1, (chunks, CHUNK)).amax(-1).topk(k).indices
    keys = chosen[..., None] * CHUNK + torch.arange(CHUNK, device=weights.device)
    rest = torch.arange(whole, weights.shape[-1], device=weights.device)
    keys = torch.cat([keys.flatten(-2), rest.expand(*keys.shape[:-2], len(rest))], -1)
    values, where = weights.gather(-1, keys).topk(k)
    return values, keys.gather(-1, where)


def positions(f: Tensor | Callable[[Tensor], Tensor], keys: int, device: torch.device) -> Tensor:
    """The values of a function of the key, or the function's own tensor."""
    return f if isinstance(f, Tensor) else torch.as_tensor(f(torch.arange(keys, device=device)))


def _slice(where: range) -> slice:
    return slice(where.start, where.stop)
