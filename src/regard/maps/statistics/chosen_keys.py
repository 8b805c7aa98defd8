"""The weights of each query on keys that are chosen for it: at places, and of earlier equal tokens."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from regard.kernels.tiled import Tile
from regard.maps.sources.source import Piece, take_rows
from regard.maps.statistics.definitions import PerQuery


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


@dataclass(frozen=True, slots=True, eq=False)
class AtPlaces(SumsOfKeys):
    places: Tensor
    """(places, T); outside [0, S) there is no key."""

    @property
    def count(self) -> int:
        return len(self.places)

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor, ...]:
        weights = piece.weights
        places = self.places[:, tile.rows.start : tile.rows.stop].mT - tile.columns.start
        inside = (places >= 0) & (places < weights.shape[-1])
        read = weights.gather(-1, places.where(inside, 0).expand(len(weights), *places.shape))
        return read.where(inside, 0.0).unbind(-1)

    def chains(self, keys: int) -> Chains:
        places = self.places[:, None]
        return Chains(places.where(places < keys, -1), places.new_full((len(places), 1, keys), -1))

    def __str__(self) -> str:
        return f"the weights at {len(self.places)} places"


@dataclass(frozen=True, slots=True, eq=False)
class OfEqualTokens(SumsOfKeys):
    """The weights of each query on earlier keys: after a token equal to its own, and on such a token."""

    tokens: Tensor
    """(sequences, S)."""
    heads: int
    """The flat_heads of a sequence."""
    positions: Tensor
    """Those of the queries, (T,)."""

    @property
    def count(self) -> int:
        return 2

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor, Tensor]:
        of_heads = [head // self.heads for head in tile.flat_heads]
        tokens = self.tokens[of_heads[:1] if of_heads[0] == of_heads[-1] else of_heads]  # one row, where it is shared
        rows = take_rows(self.positions, tile.rows)
        keys = torch.arange(tile.columns.start - 1, tile.columns.stop, device=tokens.device)
        same = tokens[:, rows.clamp_min(0), None] == tokens[:, None, keys.clamp_min(0)]
        same &= (keys >= 0) & (rows[:, None] >= 0)
        earlier = keys[1:] < rows[:, None]
        number = piece.weights.dtype
        after, on = (
            torch.linalg.vecdot(piece.weights, (one & earlier).to(number)) for one in (same[..., :-1], same[..., 1:])
        )
        return after, on

    def chains(self, keys: int) -> Chains:
        before = place_before(self.tokens)
        # After the token of key j - 1 follows key j: the chain of the equal tokens, one key further on.
        after = torch.where(before >= 0, before + 1, -1)
        after_key = torch.nn.functional.pad(after, (1, 0), value=-1)[:, :-1]
        positions = self.positions
        places = positions.clamp_min(0)
        # The key after the token just before the query is the query's own; the chain goes on with the one before.
        first = after[:, places]
        own = first == places
        first = torch.where(own, after_key.gather(-1, first.clamp_min(0)), first)
        starts = torch.stack([first, before[:, places]]).masked_fill(positions < 0, -1)
        return Chains(starts, torch.stack([after_key, before]))

    def __str__(self) -> str:
        return "the weights on equal tokens"


def place_before(ids: Tensor) -> Tensor:
    """For each position (sequences, S) the last earlier one of the same token; -1 for the first of its kind.

    >>> place_before(torch.tensor([[7, 8, 7, 7]]))
    tensor([[-1, -1,  0,  2]])
    """
    order = ids.argsort(stable=True, dim=-1)
    ordered = ids.gather(-1, order)
    same = torch.nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0), value=False)
    return torch.empty_like(order).scatter_(-1, order, order.roll(1, -1).where(same, -1))
