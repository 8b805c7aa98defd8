"""The statistics of a map, computed from tiles of weights.

The smooth ones carry gradients. Rows without keys are exactly 0 in all of them.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from regard.call.shapes import index_tensor, take_rows
from regard.errors import ArgumentError
from regard.kernels.tiled import Tile
from regard.lazy import displayed
from regard.maps.indexing import is_integer
from regard.maps.sources.source import PartOf, Piece, Source, Statistic
from regard.maps.statistics.pooling import Grid
from regard.tensors.guards import has_values, is_recorded
from regard.tensors.memory import widest_dtype

LOWEST_LOG = -1e4
"""Replaces the logarithm of a zero weight, because 0 times -inf would be NaN."""
NO_KEY = -1e20
"""The logarithms of a row without keys are below this."""
SORTED = 64
"""Keys sorted first to find a share of the mass: most rows need no more."""
ROUNDED = 1024
"""How many units of rounding an entropy of one key may be below 0: a score of some hundreds is off by that many."""
MISSED = 1e-12
"""A relative shortfall of a mass that still counts as reached: else rounding of float64 sums would decide between one
count of equal keys and the next.
"""


@displayed
class TopKeys(NamedTuple):
    """The k largest weights of each query, from the largest down, and their keys."""

    values: Tensor
    """(batch..., H, T, k)."""
    indices: Tensor
    """(batch..., H, T, k); -1 where no more keys have a weight."""


class PerQuery(Statistic):
    """One answer for each query; tiles are concatenated along the rows, and groups along the flat_heads."""

    def add(
        self, total: dict[int, list[tuple[Tensor, ...]]] | None, read: tuple[Tensor, ...], tile: Tile, source: Source
    ) -> dict[int, list[tuple[Tensor, ...]]]:
        total = {} if total is None else total
        total.setdefault(tile.flat_heads.start, []).append(read)
        return total

    def end(self, total: dict[int, list[tuple[Tensor, ...]]]) -> tuple[Tensor, ...]:
        first, *more = total.values()
        if not more and len(first) == 1:
            return first[0]
        groups = [[joined(pieces, 1) for pieces in zip(*tiles, strict=True)] for tiles in (first, *more)]
        return tuple(joined(group, 0) for group in zip(*groups, strict=True))


class PerKey(Statistic):
    """A sum over queries for each key, (flat_heads, ..., S) with the keys last."""

    @abstractmethod
    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        """The sum over a tile's rows, (flat_heads, ..., s)."""

    def add(
        self, total: dict[int, Tensor] | None, read: tuple[Tensor, ...], tile: Tile, source: Source
    ) -> dict[int, Tensor]:
        (sums,), columns, total = read, tile.columns, {} if total is None else total
        before = total.get(tile.flat_heads.start)
        if before is not None and not is_recorded():
            before[..., _slice(columns)] += sums
            return total
        sums = torch.nn.functional.pad(sums, (columns.start, source.keys - columns.stop))
        total[tile.flat_heads.start] = sums if before is None else before + sums
        return total

    def end(self, total: dict[int, Tensor]) -> tuple[Tensor]:
        return (joined(list(total.values()), 0),)


@dataclass(frozen=True, slots=True)
class Received(PerKey):
    """sum_i P_ij: (flat_heads, S)."""

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        return (piece.weights.sum(1),)

    said: ClassVar[str] = "received()"


@dataclass(frozen=True, slots=True, eq=False)
class TransposedProduct(PerKey):
    """P^T x for x (flat_heads or 1, T, N), as (flat_heads, N, S)."""

    x: Tensor

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        x = self.x if len(self.x) == 1 else self.x[_slice(tile.flat_heads)]
        return (x[:, _slice(tile.rows)].mT @ piece.weights,)

    said: ClassVar[str] = "map.mT @ x"


@dataclass(frozen=True, slots=True, eq=False)
class Product(PerQuery):
    """P x for x (flat_heads or 1, S, N): (flat_heads, T, N)."""

    x: Tensor

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        x = self.x if len(self.x) == 1 else self.x[_slice(tile.flat_heads)]
        return (piece.weights @ x[:, _slice(tile.columns)],)

    said: ClassVar[str] = "map @ x"


def without_rounding(entropy: Tensor) -> Tensor:
    """No sum is just below 0, unless a weight is just above 1; the gradient is unchanged."""
    is_rounding = (entropy <= 0) & (entropy >= -ROUNDED * torch.finfo(entropy.dtype).eps)
    return entropy - entropy.detach().where(is_rounding, 0.0)


@dataclass(frozen=True, slots=True)
class Entropy(PerQuery):
    """-sum_j P_ij ln P_ij: (flat_heads, T)."""

    reads_shares: ClassVar[bool] = True
    overwrites: ClassVar[bool] = True

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        weights = piece.weights
        if piece.logs is None:
            found = -(weights * torch.where(weights > 0, weights, 1.0).log()).sum(-1)
        elif piece.is_scratch:
            found = piece.logs.mul_(weights).sum(-1).mul_(-piece.unit)
        else:
            found = -piece.unit * torch.linalg.vecdot(weights, piece.logs.clamp_min(LOWEST_LOG))
        return (without_rounding(found),)

    said: ClassVar[str] = "entropy()"


@dataclass(frozen=True, slots=True)
class ParticipationRatio(PerQuery):
    """(sum_j P_ij)^2 / sum_j P_ij^2, and sum_j P_ij: (flat_heads, T) each."""

    reads_shares: ClassVar[bool] = True

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor, Tensor]:
        largest = piece.weights.detach().abs().amax(-1, keepdim=True)
        dead = largest == 0
        shares = piece.weights / largest.masked_fill(dead, 1.0)
        if piece.logs is not None and bool(dead.any()):
            # All weights of a row may vanish in their dtype, beside a sink: its logarithms have the shares still.
            top = piece.logs.amax(-1, keepdim=True)
            has_key = dead & (top > NO_KEY)
            # (Filled before the exponential: -inf - -inf of a row without keys has no gradient.)
            beside = ((piece.logs - top) * piece.unit).masked_fill(~has_key, 0.0)
            shares = torch.where(has_key, beside.exp(), shares)
            dead = dead & ~has_key
        squares = torch.linalg.vecdot(shares, shares)
        ratio = shares.sum(-1).square() / squares.masked_fill(dead[..., 0], 1.0)
        return ratio, piece.weights.sum(-1)

    said: ClassVar[str] = "participation_ratio()"


@dataclass(frozen=True, slots=True)
class Largest(PerQuery):
    """max_j P_ij: (flat_heads, T)."""

    needs_tiles: ClassVar[bool] = True

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        return (piece.weights.amax(-1),)

    said: ClassVar[str] = "max(-1)"


@dataclass(frozen=True, slots=True)
class ArgLargest(PerQuery):
    """The first key with the largest weight: (flat_heads, T)."""

    names_zeros: bool = False
    """Whether a row of zeros gives a key, not -1."""

    needs_tiles: ClassVar[bool] = True

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        values, indices = piece.weights.detach().max(-1)
        keys = indices + tile.columns.start
        return (keys if self.names_zeros else torch.where(values != 0, keys, -1),)

    said: ClassVar[str] = "argmax(-1)"


@dataclass(frozen=True, slots=True)
class TopWeights(PerQuery):
    """The k largest weights and their keys: (flat_heads, T, k) each. See `TopKeys`."""

    k: int
    names_zeros: bool = False
    """Whether keys of weight 0 are given, not -1."""

    needs_tiles: ClassVar[bool] = True

    @classmethod
    def of(cls, k: int, keys: int) -> "TopWeights":
        if not (type(k) is int or is_integer(k)) or not 1 <= k <= keys:
            raise ArgumentError(f"top_keys needs k in [1, {keys}], the number of keys; got {k!r}")
        return cls(int(k))

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor, Tensor]:
        weights, missing = piece.weights, self.k - piece.weights.shape[-1]
        weights = torch.nn.functional.pad(weights, (0, missing)) if missing > 0 else weights
        values, keys = (weights if is_recorded() else weights.detach()).topk(self.k, -1)
        keys += tile.columns.start
        return values, keys if self.names_zeros else torch.where(values != 0, keys, -1)

    said: ClassVar[str] = "top_keys({0.k})"


@dataclass(frozen=True, slots=True)
class TopPCount(PerQuery):
    """The fewest keys with the share p of the row's mass: (flat_heads, T) of int64."""

    share: float

    reads_shares: ClassVar[bool] = True
    needs_tiles: ClassVar[bool] = True

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        weights = piece.weights.detach()
        positive = (weights > 0).sum(-1)
        if self.share == 1:
            return (positive,)
        wide = widest_dtype(weights.device)
        goal = self.share * weights.sum(-1, keepdim=True, dtype=wide) * (1 - MISSED)
        few = min(SORTED, weights.shape[-1])
        mass = weights.topk(few, -1).values.cumsum(-1, dtype=wide)
        count = (mass < goal).sum(-1) + 1
        more = count > few
        if few < weights.shape[-1] and has_values(more) and bool(more.any()):
            ordered = weights[more].sort(-1, descending=True).values
            count[more] = (ordered.cumsum(-1, dtype=wide) < goal[more]).sum(-1) + 1
        return (count.minimum(positive),)

    said: ClassVar[str] = "top_p_count({0.share})"


@dataclass(frozen=True, slots=True)
class Distance(PerQuery):
    """sum_j P_ij |i + offset - j|: (flat_heads, T)."""

    offset: int

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        device, dtype = piece.weights.device, piece.weights.dtype
        i = torch.arange(tile.rows.start, tile.rows.stop, device=device) + self.offset
        j = torch.arange(tile.columns.start, tile.columns.stop, device=device)
        return (torch.linalg.vecdot(piece.weights, (i[:, None] - j).abs().to(dtype)),)

    said: ClassVar[str] = "distance({0.offset})"


@dataclass(frozen=True, slots=True, eq=False)
class PlacedDistance(PerQuery):
    """The distance of chosen rows and columns of a whole map: (flat_heads, T)."""

    positions: Tensor
    """(T,)."""
    columns: Tensor
    """(S,)."""

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        i = take_rows(self.positions, tile.rows)
        far = (i[:, None] - take_rows(self.columns, tile.columns)).abs().to(piece.weights.dtype)
        return (torch.linalg.vecdot(piece.weights, far),)

    said: ClassVar[str] = "distance() of chosen rows"


def distance_in(part: PartOf, device: torch.device) -> Distance | PlacedDistance:
    rows, columns = part.rows, part.columns
    if isinstance(rows, range) and isinstance(columns, range):
        return Distance(rows.start + part.keys - part.queries - columns.start)
    return PlacedDistance(part.positions(device), index_tensor(columns, device))


@dataclass(frozen=True, slots=True)
class Pooled(Statistic):
    """The sum, the mean or the largest weight of each block of a grid: (flat_heads, rows, columns)."""

    grid: Grid
    how: str

    needs_tiles: ClassVar[bool] = True

    @property
    def of_largest(self) -> bool:
        return self.how == "max"

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        return (self.grid.reduce(piece.weights, tile.rows.start, tile.columns.start, largest=self.of_largest),)

    def add(
        self, total: dict[int, Tensor] | None, read: tuple[Tensor, ...], tile: Tile, source: Source
    ) -> dict[int, Tensor]:
        (part,), total, rows, columns = read, {} if total is None else total, self.grid.rows, self.grid.columns
        apart = is_recorded()
        flat_heads, first = (len(part), tile.flat_heads.start) if apart else (source.flat_heads, 0)
        if first not in total:
            start = -torch.inf if self.of_largest and source.has_signs else 0.0
            total[first] = part.new_full((flat_heads, rows.count, columns.count), start)
        row, column = rows.index_of(tile.rows.start), columns.index_of(tile.columns.start)
        picture = total[first] if apart else total[first][_slice(tile.flat_heads)]
        where = picture[:, row : row + part.shape[1], column : column + part.shape[2]]
        # Autograd saves the inputs of the maximum: copy them, since the next tile overwrites the originals.
        before = where.clone() if apart else where
        where[...] = torch.maximum(before, part) if self.of_largest else before + part
        return total

    def end(self, total: dict[int, Tensor]) -> tuple[Tensor]:
        picture = joined(list(total.values()), 0)
        return (self.finished(picture),)

    def finished(self, sums: Tensor) -> Tensor:
        if self.how != "mean":
            return sums
        areas = self.grid.areas(sums.device)
        return sums / areas if is_recorded() else sums.div_(areas)

    said: ClassVar[str] = "pooled({0.grid.rows.count}, {0.grid.columns.count}, {0.how!r})"


def joined(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat` without a copy of a single tensor."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)


def _slice(where: range) -> slice:
    return slice(where.start, where.stop)


class Chains(NamedTuple):
    """The keys of each query as a chain in descending order: its first key, and of each key the next; -1 is the end."""

    first: Tensor
    """(chains, sequences or 1, T) of int64."""
    following: Tensor
    """(chains, sequences or 1, S)."""


class SumsOfKeys(PerQuery):
    """Sums of the weights of each query on its keys, (flat_heads, T) for each chain."""

    needs_tiles: ClassVar[bool] = True

    @property
    @abstractmethod
    def count(self) -> int:
        """How many answers it has."""

    @abstractmethod
    def chains(self, keys: int) -> Chains:
        """The chosen of so many keys, for a loop over rows."""
