"""Sums of the weights of a query over sets of keys: within a mask, over spans, at places, and on equal tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.call.masks.base import And, DenseMask, Mask, Not, Or
from regard.call.masks.basic import as_mask
from regard.call.masks.selection import SelectedMask
from regard.call.normalizations import Softmax
from regard.call.shapes import Sizes, index_tensor, take_rows
from regard.errors import ArgumentError, ShapeError
from regard.kernels import execute
from regard.kernels.tiled import Tile
from regard.maps.sources.call import CallSource
from regard.maps.sources.factors import ShiftedBias
from regard.maps.sources.source import PartOf, Piece, Source, Statistic
from regard.maps.statistics.definitions import Chains, PerQuery, SumsOfKeys, joined
from regard.maps.statistics.tiles import ask
from regard.tensors.memory import widest_dtype


def kept_mass(source: Source, mask: Mask | Tensor) -> Tensor:
    """The sum of the weights within a mask, (batch..., H, T). See `AttentionMap.mass`."""
    chosen = as_mask(mask)
    if chosen is None:
        raise ArgumentError("mass() needs a mask, such as regard.window(8) or a bool tensor; got None")
    leading, has_heads = source.leading, source.dimensions.has_heads_last
    heads = leading[-1] if has_heads else 1
    sizes = Sizes(leading[:-1] if has_heads else leading, heads, heads, source.queries, source.keys, has_heads)
    bound = _bound(chosen, source.part_of, sizes, source.device)
    found = _by_lse(source, bound, sizes) if isinstance(source, CallSource) else None
    return source.laid_out(ask(source, Mass(bound, sizes))[0] if found is None else found)


def _bound(mask: Mask, part: PartOf, sizes: Sizes, device: torch.device) -> Mask:
    """A mask bound to a map. A tensor has the shape of the map; a predicate is that of the whole."""
    if part.is_whole or isinstance(mask, DenseMask):
        return mask.bind(sizes, device)
    if isinstance(mask, And | Or):
        return type(mask)(tuple(_bound(one, part, sizes, device) for one in mask.masks))
    if isinstance(mask, Not):
        return Not(_bound(mask.mask, part, sizes, device))
    whole = mask.bind(replace(sizes, queries=part.queries, keys=part.keys), device)
    rows, columns = (index_tensor(places, device) for places in (part.rows, part.columns))
    return SelectedMask(whole, rows=rows, columns=columns)


def _by_lse(source: CallSource, mask: Mask, sizes: Sizes) -> Tensor | None:
    """exp(lse under both masks - lse), one fused call; None if the map is no softmax, or is a choice of flat_heads."""
    call, state = source.factors.read()
    shares_sizes = (call.sizes.flat_batch, call.sizes.heads) == (sizes.flat_batch, sizes.heads)
    if not isinstance(call.normalization.base, Softmax) or not shares_sizes:
        return None
    if isinstance(call.bias, ShiftedBias):  # The kernels do not support shifted rows.
        return None
    both = mask if call.mask is None else And((*call.mask.factors(), *mask.factors()))
    key = call.key.to(call.compute_dtype)
    narrower = replace(
        call, query=call.query.to(key.dtype), key=key, normalization=Softmax(), mask=both, dropout=0.0
    )  # fmt: skip
    _, lse = execute(source.backend, narrower, key.new_zeros(*key.shape[:-1], 1))
    dead = lse == -torch.inf
    state = state.masked_fill(dead, 0.0)
    return torch.exp(lse.masked_fill(dead, 0.0) - state).masked_fill(dead, 0.0).flatten(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Mass(PerQuery):
    """sum_j P_ij over the keys of a mask: (flat_heads, T)."""

    mask: Mask
    sizes: Sizes

    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor]:
        flat_heads = torch.arange(tile.flat_heads.start, tile.flat_heads.stop, device=piece.weights.device)
        mask = SelectedMask(self.mask, flat_heads // self.sizes.heads, flat_heads % self.sizes.heads)
        sizes = replace(self.sizes, batch=(len(flat_heads),), heads=1, kv_heads=1, has_heads=False)
        allowed = mask.block(tile.rows, tile.columns, sizes=sizes, device=flat_heads.device)[:, 0]
        return ((piece.weights * allowed).sum(-1),)

    def __str__(self) -> str:
        return f"mass({self.mask})"


Spans = Sequence[tuple[int, int]] | Tensor
"""(first, stop) of each span, in tokens; `stop` is exclusive."""


def by_spans(source: Source, keys: Spans | None, queries: Spans | None) -> Tensor:
    """(batch..., H, spans of queries, spans of keys). See `AttentionMap.spans`."""
    rows, columns = _checked(queries, source.queries, "query"), _checked(keys, source.keys, "key")
    return source.laid_out(ask(source, Spanned(Cut(rows, source.device), Cut(columns, source.device)))[0])


def _checked(spans: Spans | None, length: int, name: str) -> tuple[tuple[int, int], ...]:
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
