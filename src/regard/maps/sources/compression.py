"""The weights by which blocks are made of tokens, and maps over blocks led back to tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.call.shapes import UNNAMED, Dimensions, Rows
from regard.maps.sources.combined import SeveralSource
from regard.maps.sources.source import NamedSource, Part, Piece, Scratch, Source, Statistic
from regard.maps.statistics import definitions as st
from regard.maps.statistics.tiles import ask


@dataclass(frozen=True, slots=True, eq=False)
class Compression(NamedSource):
    """P_wj: the share of position j in block w, which is made of the last L positions up to its end."""

    shares: Tensor
    """(N, n, L) for each flat head; a row sums to 1."""
    rate: int
    """Block w ends with position (w + 1) rate - 1. L is a multiple of the rate."""
    positions: int
    layout: tuple[int, ...]
    names: Dimensions

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.layout, self.shares.shape[1], self.positions))

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.shares.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self.shares.device

    def tensors(self) -> list[Tensor]:
        return [self.shares]

    def __str__(self) -> str:
        return f"a compression of {self.rate} positions a block"

    def columns(self, rows: range) -> range:
        return range(max((rows.start + 1) * self.rate - self.shares.shape[-1], 0), rows.stop * self.rate)

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        shares, width = self.shares[flat_heads.start : flat_heads.stop].to(self.dtype), self.shares.shape[-1]

        def block(rows: Rows, columns: Rows) -> Piece:
            w, j = (torch.as_tensor(places, device=self.device) for places in (rows, columns))
            place = j - ((w + 1) * self.rate - width)[:, None]
            chosen = shares[:, w].gather(-1, place.clamp(0, width - 1).expand(len(shares), -1, -1))
            return Piece(chosen * ((place >= 0) & (place < width)))

        return block

    def over_heads(self, heads: int) -> "Compression":
        shares = self.shares.unflatten(0, self.layout).mean(1)[:, None].expand(-1, heads, -1, -1)
        layout = (self.layout[0], heads)
        return Compression(shares.flatten(0, 1), self.rate, self.positions, layout, self.names)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Compression":
        return replace(self, shares=change(self.shares))


@dataclass(frozen=True, eq=False)
class OverTokens(NamedSource, SeveralSource):
    """A map over positions and blocks, times the map of the blocks: [A | B] becomes A + B P."""

    weights: Source
    """Its keys are the positions, then the blocks."""
    blocks: Source
    """A `Compression` for each of its flat heads."""
    names: Dimensions

    @property
    def parts(self) -> tuple[Source, ...]:  # type: ignore[override]
        return (self.weights, self.blocks)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.weights.shape[:-1], self.blocks.keys))

    def __str__(self) -> str:
        return f"{self.weights}, its blocks led back to tokens"

    def columns(self, rows: range) -> range:
        return range(self.keys)

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        over, of_blocks = self.weights.part(flat_heads), self.blocks.part(flat_heads)
        count = self.blocks.queries

        def block(rows: Rows, columns: Rows) -> Piece:
            through = over(rows, range(self.keys, self.keys + count)).weights @ of_blocks(range(count), columns).weights
            return Piece(over(rows, columns).weights + through)

        return block

    def at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        match statistic:
            case st.Product(x):
                (of_blocks,) = ask(self.blocks, statistic)
                return ask(self.weights, st.Product(torch.cat([x.expand(len(of_blocks), -1, -1), of_blocks], 1)))
            case st.TransposedProduct(x):
                (both,) = ask(self.weights, statistic)
                on_blocks = st.TransposedProduct(both[..., self.keys :].mT)
                return (both[..., : self.keys] + ask(self.blocks, on_blocks)[0],)
        return None

    def choose(self, flat_heads: Tensor | None, leading: tuple[int, ...]) -> "OverTokens":
        names = Dimensions.unknown(len(leading), UNNAMED)
        weights, blocks = self.weights.choose(flat_heads, leading), self.blocks.choose(flat_heads, leading)
        return OverTokens(weights, blocks, names)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "OverTokens":
        return OverTokens(self.weights.mapped(change), self.blocks.mapped(change), self.names)
