"""Where the tiles of each kind of map come from."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from regard.backends.base import Call
from regard.maps.tiles import Part, Piece, Rows, Source
from regard.normalizations import Softmax
from regard.shapes import take

NEVER = 1e30
"""Stands for the state of a row with no key: its weights are exp(-1e30) = 0, without the NaN of inf - inf."""


class OfCall(Source):
    """The weights of an attention call, from its scores and row state."""

    def __init__(self, call: Call, state: Tensor) -> None:
        sizes = call.sizes
        self.call, self.state = call, state
        self.cells, self.queries, self.keys = sizes.flat_batch * sizes.heads, sizes.queries, sizes.keys
        self.width = call.score.pair_width(call.query.shape[-1])

    def columns(self, rows: range) -> range:
        """What the mask allows."""
        mask = self.call.mask
        return range(self.keys) if mask is None else mask.key_range(rows, self.call.sizes)

    def part(self, cells: range, *, reuse: bool = False) -> Part:
        """The call on those cells; all of them need no choice."""
        if reuse and isinstance(self.call.normalization, Softmax):
            scale = self.call.score.dot_scale(self.call.query.shape[-1])
            if scale is not None:
                return _Buffered(self.call, self.state, scale, cells)
        if len(cells) == self.cells:
            return lambda rows, columns: _weights(self.call, self.state, rows, columns)
        chosen = torch.arange(cells.start, cells.stop, device=self.state.device)
        call, state = self.call.select(chosen), self.state.flatten(0, 1)[cells.start : cells.stop, None]
        return lambda rows, columns: _weights(call, state, rows, columns)


def _weights(call: Call, state: Tensor, rows: Rows, columns: Rows) -> Piece:
    scores = call.scores(rows, columns)
    state = take_rows(state, rows)
    if not isinstance(call.normalization, Softmax):
        return Piece(call.normalization.weights(scores, state).flatten(0, 1))
    # With +inf in the place of -inf a dead row's weights are exp(-inf) = 0.
    logs = (scores - state.masked_fill(state == -torch.inf, torch.inf)[..., None]).flatten(0, 1)
    return Piece(torch.exp(logs), logs)


class _Buffered:
    """The weights of a softmax of dot products, each block in the place of the one before: no gradients.

    The row state is one more dimension of the vectors, so that the product of the two is the logarithm.
    """

    def __init__(self, call: Call, state: Tensor, scale: float, cells: range) -> None:
        chosen = torch.arange(cells.start, cells.stop, device=state.device)
        self.call = call.select(chosen)
        dtype, state = call.compute_dtype, state.flatten(0, 1)[cells.start : cells.stop]
        query, key = self.call.query.squeeze(1).to(dtype), self.call.key.squeeze(1).to(dtype)
        state = state.masked_fill(state == -torch.inf, NEVER).neg()[..., None]
        self.query = torch.cat([query * scale, state.to(dtype)], -1)
        self.key = torch.cat([key, torch.ones_like(key[..., :1])], -1).mT
        self.logs, self.weights = query.new_empty(0), query.new_empty(0)

    def __call__(self, rows: Rows, columns: Rows) -> Piece:
        query, key = take_rows(self.query.mT, rows).mT, take_rows(self.key, columns)
        shape = (len(query), query.shape[1], key.shape[2])
        if self.logs.numel() < shape[0] * shape[1] * shape[2]:
            self.logs, self.weights = (query.new_empty(shape[0] * shape[1] * shape[2]) for _ in range(2))
        logs, weights = (t[: shape[0] * shape[1] * shape[2]].view(shape) for t in (self.logs, self.weights))
        torch.bmm(query, key, out=logs)
        call = self.call
        if call.bias is not None:
            vectors = {"query": take(call.query, rows), "key": take(call.key, columns)}
            logs += call.bias.block(rows, columns, **vectors, sizes=call.sizes).to(logs.dtype).squeeze(1)
        if call.mask is not None:
            logs.unsqueeze(1).masked_fill_(~call.allowed(call.mask, rows, columns), -torch.inf)
        return Piece(torch.exp(logs, out=weights), logs, is_scratch=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Averaged:
    part: Part
    count: int
    shares: Tensor | None

    def __call__(self, rows: Rows, columns: Rows) -> Piece:
        weights = self.part(rows, columns).weights.unflatten(0, (-1, self.count))
        if self.shares is None:
            return Piece(weights.mean(1))
        return Piece(torch.einsum("cnts,n->cts", weights, self.shares))


class OfAverage(Source):
    """The mean over groups of `count` neighbouring cells of another source."""

    def __init__(self, source: Source, count: int, shares: Tensor | None) -> None:
        self.source, self.count, self.shares = source, count, shares
        self.cells, self.queries, self.keys = source.cells // count, source.queries, source.keys
        self.width = source.width * count

    def columns(self, rows: range) -> range:
        """The same for every head."""
        return self.source.columns(rows)

    def part(self, cells: range, *, reuse: bool = False) -> Part:
        """The mean of the cells' groups."""
        inner = self.source.part(range(cells.start * self.count, cells.stop * self.count), reuse=reuse)
        return _Averaged(inner, self.count, self.shares)


class OfSelection(Source):
    """Some rows and columns of another source."""

    def __init__(self, source: Source, rows: Rows, columns: Rows) -> None:
        self.source, self.rows, self.chosen = source, rows, columns
        self.cells, self.queries, self.keys, self.width = source.cells, len(rows), len(columns), source.width

    def columns(self, rows: range) -> range:
        """The other source's, where rows and columns are neighbours."""
        if not isinstance(self.rows, range) or not isinstance(self.chosen, range):
            return range(self.keys)
        inner = self.source.columns(range(self.rows.start + rows.start, self.rows.start + rows.stop))
        start = max(inner.start, self.chosen.start)
        stop = max(start, min(inner.stop, self.chosen.stop))
        return range(start - self.chosen.start, stop - self.chosen.start)

    def part(self, cells: range, *, reuse: bool = False) -> Part:
        """The other source's, asked for the rows and columns meant."""
        inner = self.source.part(cells, reuse=reuse)
        return lambda rows, columns: inner(_of(self.rows, rows), _of(self.chosen, columns))


class OfSteps(Source):
    """Sources whose rows follow one another; those with fewer keys have zeros at the end."""

    def __init__(self, sources: list[Source]) -> None:
        self.sources = sources
        self.ends = list(accumulate(s.queries for s in sources))
        self.cells, self.queries, self.keys = sources[0].cells, self.ends[-1], max(s.keys for s in sources)
        self.width = max(s.width for s in sources)

    def steps(self, rows: range) -> list[tuple[int, range]]:
        """The sources that rows are in, and which of their rows are meant."""
        found, at = [], rows.start
        while at < rows.stop:
            step = bisect_right(self.ends, at)
            begin, stop = self.ends[step] - self.sources[step].queries, min(rows.stop, self.ends[step])
            found.append((step, range(at - begin, stop - begin)))
            at = stop
        return found

    def columns(self, rows: range) -> range:
        """The hull of the steps'."""
        ranges = [r for step, inner in self.steps(rows) if (r := self.sources[step].columns(inner))]
        return range(min(r.start for r in ranges), max(r.stop for r in ranges)) if ranges else range(0)

    def part(self, cells: range, *, reuse: bool = False) -> Part:
        """The steps' weights, one below the other."""
        parts = [source.part(cells) for source in self.sources]

        def weights(rows: Rows, columns: Rows) -> Piece:
            if not isinstance(rows, range):
                pieces = [weights(range(i, i + 1), columns).weights for i in rows.tolist()]
                return Piece(torch.cat(pieces, dim=1))
            found = [_padded(parts[step], inner, columns, self.sources[step].keys) for step, inner in self.steps(rows)]
            return Piece(found[0] if len(found) == 1 else torch.cat(found, dim=1))

        return weights


def _padded(part: Part, rows: range, columns: Rows, keys: int) -> Tensor:
    """The block of a part whose keys end before those asked for; what lies beyond is 0."""
    if isinstance(columns, range):
        start = min(columns.start, keys - 1)
        known = range(start, max(start + 1, min(columns.stop, keys)))
        weights = part(rows, known).weights
        if columns.start >= keys:
            return weights.new_zeros(*weights.shape[:-1], len(columns))
        return torch.nn.functional.pad(weights, (0, columns.stop - known.stop))
    beyond = columns >= keys
    return part(rows, columns.clamp_max(keys - 1)).weights.masked_fill(beyond, 0.0)


class OfFactor(Source):
    """Another source's weights times a_i . b_j, or a_i . b_j alone."""

    def __init__(self, source: Source | None, left: Tensor | None, right: Tensor, queries: int) -> None:
        self.source, self.left, self.right = source, left, right
        self.cells, self.queries, self.keys = right.shape[0], queries, right.shape[1]
        self.width = 1 if source is None else source.width

    def columns(self, rows: range) -> range:
        """All where the products have signs: a 0 that is left out may be the largest."""
        return range(self.keys) if self.source is None or self.left is not None else self.source.columns(rows)

    def part(self, cells: range, *, reuse: bool = False) -> Part:
        """The product of the two, pair by pair."""
        where = slice(cells.start, cells.stop)
        inner = None if self.source is None else self.source.part(cells, reuse=reuse)
        right = self.right[where]
        left = None if self.left is None else self.left[where]

        def weights(rows: Rows, columns: Rows) -> Piece:
            factor = take_rows(right.mT, columns)
            if left is not None:
                factor = take_rows(left.mT, rows).mT @ factor
            return Piece(factor if inner is None else inner(rows, columns).weights * factor)

        return weights


def take_rows(tensor: Tensor, rows: Rows) -> Tensor:
    """Places of the last dimension."""
    return tensor[..., rows.start : rows.stop] if isinstance(rows, range) else tensor[..., rows]


def _of(chosen: Rows, places: Rows) -> Rows:
    """The places' own numbers among those chosen."""
    if not isinstance(chosen, range):
        return chosen[places.start : places.stop] if isinstance(places, range) else chosen[places]
    if isinstance(places, range):
        return range(chosen.start + places.start, chosen.start + places.stop)
    return places + chosen.start
