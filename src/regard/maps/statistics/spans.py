"""Sums of weights over spans of keys, and means over spans of queries: words from pieces, sentences from words."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.kernels.tiled import Tile
from regard.maps.sources.source import Piece, Source, Statistic
from regard.maps.statistics.definitions import joined
from regard.maps.statistics.tiles import ask
from regard.tensors.memory import widest_dtype

Spans = Sequence[tuple[int, int]] | Tensor
"""(first, stop) of each span, in tokens; `stop` is exclusive."""


def by_spans(source: Source, keys: Spans | None, queries: Spans | None) -> Tensor:
    """(batch..., H, spans of queries, spans of keys). See `AttentionMap.spans`."""
    rows, columns = _checked(queries, source.queries, "query"), _checked(keys, source.keys, "key")
    return source.laid_out(ask(source, Spanned(Cut(rows, source.device), Cut(columns, source.device)))[0])


def _checked(spans: Spans | None, length: int, name: str) -> tuple[tuple[int, int], ...]:
    """The spans as pairs of integers; by default one for each position."""
    if spans is None:
        return tuple((i, i + 1) for i in range(length))
    pairs: list[tuple[int, int]] = []
    try:
        given: list[Any] = spans.tolist() if isinstance(spans, Tensor) else list(spans)
    except TypeError:
        raise ShapeError(f"spans() takes a list of pairs (first, stop), got {spans!r}") from None
    for number, span in enumerate(given):
        try:
            first, stop = (index(end) for end in span)
        except (TypeError, ValueError):
            raise ShapeError(
                f"a span is a pair of whole numbers (first, stop) of a {name}, got {span!r} as span {number}"
            ) from None
        if not 0 <= first < stop <= length:
            raise ShapeError(
                f"a span (first, stop) of {length} {'queries' if name == 'query' else 'keys'} needs "
                f"0 <= first < stop <= {length}, got {(first, stop)} as span {number}"
            )
        pairs.append((first, stop))
    if not pairs:
        raise ShapeError(f"spans() needs at least one span of a {name}, got none")
    return tuple(pairs)


class Cut:
    """Spans of one axis as three lists, with an entry for each token of each span, since spans may overlap."""

    def __init__(self, spans: tuple[tuple[int, int], ...], device: torch.device) -> None:
        first, stop = torch.tensor(spans, device=device).unbind(1)
        lengths = stop - first
        self.count = len(spans)
        total = sum(end - start for start, end in spans)
        self.owners = torch.arange(self.count, device=device).repeat_interleave(lengths, output_size=total)
        before = lengths.cumsum(0) - lengths
        self.places = torch.arange(len(self.owners), device=device) - (before - first)[self.owners]
        self.shares = (1.0 / lengths.to(widest_dtype(device)))[self.owners]

    def within(self, window: range) -> tuple[Tensor, Tensor, Tensor]:
        """The owners, the indices and the shares of the tokens in a window; the indices count from its start."""
        inside = (self.places >= window.start) & (self.places < window.stop)
        return self.owners[inside], self.places[inside] - window.start, self.shares[inside]


@dataclass(frozen=True, slots=True, eq=False)
class Spanned(Statistic):
    """The mean over a span's queries of the sums over a span's keys: (flat_heads, spans of queries, spans of keys)."""

    rows: Cut
    columns: Cut

    needs_tiles: ClassVar[bool] = True

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor, Tensor]:
        weights = piece.weights
        owners, places, _ = self.columns.within(tile.columns)
        sums = weights.new_zeros(*weights.shape[:-1], self.columns.count).index_add(-1, owners, weights[..., places])
        owners, places, shares = self.rows.within(tile.rows)
        touched, positions = owners.unique(return_inverse=True)
        parts = sums[:, places] * shares.to(sums.dtype)[:, None]
        return sums.new_zeros(len(sums), len(touched), sums.shape[-1]).index_add(1, positions, parts), touched

    def add(
        self, total: dict[int, Tensor] | None, read: tuple[Tensor, ...], tile: Tile, source: Source
    ) -> dict[int, Tensor]:
        (part, touched), total, first = read, {} if total is None else total, tile.flat_heads.start
        if first not in total:
            total[first] = part.new_zeros(len(part), self.rows.count, part.shape[-1])
        total[first].index_add_(1, touched, part)
        return total

    def end(self, total: dict[int, Tensor]) -> tuple[Tensor]:
        return (joined(list(total.values()), 0),)

    def __str__(self) -> str:
        return f"spans({self.columns.count} of keys, {self.rows.count} of queries)"
