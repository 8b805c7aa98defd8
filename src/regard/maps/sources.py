"""Where the tiles of each kind of map come from."""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from regard.backends.base import Call
from regard.maps.tiles import Part, Piece, Rows, Source
from regard.mechanisms.masks.base import Mask
from regard.mechanisms.normalizations import Softmax
from regard.mechanisms.shapes import take

NEVER = 1e30
"""Stands for the state of a row with no key: its weights are 0, without the NaN of inf - inf or 0 * inf."""
LN_2 = math.log(2)
"""Weights are powers of 2, since `exp` of float32 on the CPU takes up to 170 times as long where it is nearly 0."""


class OfCall(Source):
    """The weights of an attention call, from its scores and row state."""

    def __init__(self, call: Call, state: Tensor) -> None:
        sizes = call.sizes
        self.call, self.state = call, state
        self.shared: _Shared | None = None
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
                self.shared = self.shared or _Shared(self.call, self.state)
                return _Buffered(self.call, scale, self.shared, cells)
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
    logs = (scores - state.masked_fill(state == -torch.inf, torch.inf)[..., None]).flatten(0, 1) / LN_2
    return Piece(torch.exp2(logs), logs, LN_2)


class _Buffered:
    """The weights of some cells of a softmax of dot products, each block in the place of the one before.

    It takes no gradient. The buffers, and the vectors of all cells, are shared with the other cells' parts.
    """

    def __init__(self, call: Call, scale: float, shared: "_Shared", cells: range) -> None:
        self.scale, self.shared = scale / LN_2, shared
        self.query = shared.query[cells.start : cells.stop]
        self.key = shared.key_of(cells).mT
        self.state = shared.state[cells.start : cells.stop]
        looks = frozenset() if call.mask is None else call.mask.depends_on()
        if call.bias is not None or looks & {"batch", "head"}:
            call = call.select(torch.arange(cells.start, cells.stop, device=self.state.device))
        self.call = call

    def __call__(self, rows: Rows, columns: Rows) -> Piece:
        query, key = take_rows(self.query.mT, rows).mT, take_rows(self.key, columns)
        logs, weights = self.shared.buffers((len(query), query.shape[1], key.shape[2]))
        torch.baddbmm(logs, query, key, beta=0, alpha=self.scale, out=logs)
        logs -= take_rows(self.state, rows)[..., None]
        call = self.call
        if call.bias is not None:
            vectors = {"query": take(call.query, rows), "key": take(call.key, columns)}
            bias = call.bias.block(rows, columns, **vectors, sizes=call.sizes).to(logs.dtype).squeeze(1)
            logs.add_(bias, alpha=1 / LN_2)
            logs.clamp_min_(-NEVER)
        if call.mask is not None:
            covered = _covered(call.mask, rows, columns)
            if covered < len(columns):
                hidden = ~call.allowed(call.mask, rows, columns[covered:])
                logs[..., covered:].unsqueeze(1).masked_fill_(hidden, -NEVER)
        return Piece(torch.exp2(logs, out=weights), logs, LN_2, is_scratch=True)


class _Shared:
    """The vectors and the row state of all cells in the map's dtype, and two buffers for blocks."""

    def __init__(self, call: Call, state: Tensor) -> None:
        dtype = call.compute_dtype
        self.group = call.group
        self.query, self.key = (t.to(dtype).flatten(0, 1) for t in (call.query, call.key))
        state = state.flatten(0, 1)
        self.state = (state / LN_2).masked_fill(state == -torch.inf, NEVER)
        self.logs = self.weights = self.query.new_empty(0)

    def key_of(self, cells: range) -> Tensor:
        """The keys of each cell: of the batch row and the head of keys that it has."""
        if self.group == 1:
            return self.key[cells.start : cells.stop]
        # Heads of keys divide heads, so that flat cells and flat heads of keys go together.
        return self.key[torch.arange(cells.start, cells.stop, device=self.key.device) // self.group]

    def buffers(self, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """Two tensors of a shape; memory that was touched before is many times faster."""
        count = math.prod(shape)
        if self.logs.numel() < count:
            self.logs, self.weights = (self.query.new_empty(count) for _ in range(2))
        return self.logs[:count].view(shape), self.weights[:count].view(shape)


def _covered(mask: Mask, rows: Rows, columns: Rows) -> int:
    """How many of the first columns the mask leaves as they are: most of a causal tile."""
    if not isinstance(rows, range) or not isinstance(columns, range):
        return 0
    return bisect_left(range(1, len(columns) + 1), True, key=lambda count: not mask.covers(rows, columns[:count]))


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
        self.width, self.has_signs = source.width * count, source.has_signs

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
        self.cells, self.queries, self.keys = source.cells, len(rows), len(columns)
        self.width, self.has_signs = source.width, source.has_signs

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
        self.width, self.has_signs = max(s.width for s in sources), any(s.has_signs for s in sources)

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
        """The hull of the steps'; all where there are signs, since the zeros beyond it may be the largest."""
        if self.has_signs:
            return range(self.keys)
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
        self.width, self.has_signs = 1 if source is None else source.width, left is not None

    def columns(self, rows: range) -> range:
        """All where the products have signs: a 0 that is left out may be the largest."""
        return range(self.keys) if self.source is None or self.has_signs else self.source.columns(rows)

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
