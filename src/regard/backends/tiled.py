"""Any score, mask, normalization and learned bias, in memory linear in T and S.

A tile is a few queries of a few heads against every key that they may see. Its scores and weights exist
while it runs, and are computed again, tile by tile, in the backward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.backends.base import Backend, Call
from regard.biases import Bias, Dense, Given

TILE_ELEMENTS = 1 << 20
"""Numbers that one tile's largest tensor may hold, so that it stays in the cache: 4 MiB in float32."""
TILE_ROWS = 256
"""Queries below which a tile is rather made of fewer heads: narrow matrix products are slow."""


class Tiled(Backend):
    """The reference's arithmetic on one tile at a time.

    Whatever the reference differentiates this does too, twice if asked, in memory linear in the number of
    queries plus one tile. Dropout draws one seed, from which each tile's bits are made again in backward.
    """

    name = "tiled"

    def why_not(self, call: Call) -> str | None:
        """It runs every call."""
        return None

    def run(self, call: Call, value: Tensor) -> tuple[Tensor, Tensor]:
        """Run the tiles and put their rows together."""
        dtype, (batch, heads) = value.dtype, call.query.shape[:2]
        seed = int(torch.randint(2**62, ()).item()) if call.dropout else 0
        # Upcast and repeat the key heads once, rather than in every tile.
        call, value = call.expanded(), value.to(call.compute_dtype).repeat_interleave(call.group, dim=1)
        tensors = (call.query.flatten(0, 1), call.key.flatten(0, 1), value.flatten(0, 1))
        tiling = Tiling(call, seed)
        if torch.is_grad_enabled() and not call.score.is_declared:
            output, state = tiling.composite(*tensors)
        else:
            output, state = _Tiles.apply(tiling, *tensors, *call.learned())
        return output.unflatten(0, (batch, heads)).to(dtype), state.unflatten(0, (batch, heads))


@dataclass(frozen=True, slots=True)
class Tile:
    """Some cells (flat indices of batch and head), some of their queries, and the keys that these may see."""

    cells: range
    rows: range
    columns: range

    def take(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tile's part of tensors (cells, length, dim), as views (cells, 1, length, dim)."""
        cells = _slice(self.cells)
        rows, columns = _slice(self.rows), _slice(self.columns)
        return query[cells, None, rows], key[cells, None, columns], value[cells, None, columns]


class Tiling:
    """A call cut into tiles. It keeps the call's objects, not its query and key."""

    def __init__(self, call: Call, seed: int) -> None:
        self.seed = seed
        nothing = call.query.new_empty((*call.query.shape[:2], 0, 0))
        self.width = call.score.pair_width(call.query.shape[-1])
        self.call = replace(call, query=nothing, key=nothing)

    def tiles(self) -> Iterator[Tile]:
        """Every tile: few cells and many rows where both do not fit."""
        sizes = self.call.sizes
        cells, a_row = sizes.flat_batch * sizes.heads, max(1, sizes.keys * self.width)
        rows = max(1, min(sizes.queries, TILE_ROWS, TILE_ELEMENTS // a_row))
        few = max(1, min(cells, TILE_ELEMENTS // (a_row * rows)))
        rows = max(rows, min(sizes.queries, TILE_ELEMENTS // (a_row * few)))
        for cell in range(0, cells, few):
            for row in range(0, sizes.queries, rows):
                yield self._tile(range(cell, min(cell + few, cells)), range(row, min(row + rows, sizes.queries)))

    def _tile(self, cells: range, rows: range) -> Tile:
        sizes, mask = self.call.sizes, self.call.mask
        columns = range(sizes.keys) if mask is None else mask.key_range(rows, sizes)
        # Normalizing needs a key to look at; the mask still says that there is none.
        return Tile(cells, rows, columns or range(1))

    def part(self, cells: range) -> Call:
        """The call on the cells of a tile."""
        return self.call.select(torch.arange(cells.start, cells.stop, device=self.call.query.device))

    def kept(self, tile: Tile, weights: Tensor) -> Tensor | None:
        """What dropout multiplies a tile's weights by, or None."""
        dropout = self.call.dropout
        if not dropout:
            return None
        seed = self.seed + tile.cells.start * self.call.sizes.queries + tile.rows.start
        generator = torch.Generator(weights.device).manual_seed(seed)
        kept = torch.rand(weights.shape, generator=generator, device=weights.device) >= dropout
        return kept.to(weights.dtype) / (1.0 - dropout)

    def forward(self, tile: Tile, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Output (cells, t, E) and row state (cells, t) of a tile, from its own vectors."""
        part = self.part(tile.cells)
        weights, state = part.normalization.normalize(part.scores_of(query, key, tile.rows, tile.columns))
        kept = self.kept(tile, weights)
        weights = weights if kept is None else weights * kept
        return (weights @ value).squeeze(1), state.squeeze(1)

    def assemble(self, pieces: list[tuple[Tile, Tensor]]) -> Tensor:
        """Tiles, in the order of `tiles`, put together along rows and cells."""
        by_cells: dict[int, list[Tensor]] = {}
        for tile, piece in pieces:
            by_cells.setdefault(tile.cells.start, []).append(piece)
        return torch.cat([torch.cat(rows, dim=1) if len(rows) > 1 else rows[0] for rows in by_cells.values()])

    def composite(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All tiles as checkpointed pieces of one graph, which can be differentiated any number of times."""
        outputs, states = [], []
        for tile in self.tiles():
            vectors = tile.take(query, key, value)
            output, state = checkpoint(self.forward, tile, *vectors, use_reentrant=False, preserve_rng_state=False)
            outputs.append((tile, output))
            states.append((tile, state))
        return self.assemble(outputs), self.assemble(states)


class _Tiles(torch.autograd.Function):
    """The tiles of a call: (query, key, value, learned tensors...) -> (output, row state), with gradients."""

    @staticmethod
    def forward(
        ctx: Any, tiling: Tiling, query: Tensor, key: Tensor, value: Tensor, *learned: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs, states = [], []
        for tile in tiling.tiles():
            output, state = tiling.forward(tile, *tile.take(query, key, value))
            outputs.append((tile, output))
            states.append((tile, state))
        output, state = tiling.assemble(outputs), tiling.assemble(states)
        ctx.tiling = tiling
        ctx.save_for_backward(query, key, value, state, *learned)
        ctx.set_materialize_grads(False)
        return output, state

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, state, *learned = ctx.saved_tensors
        tiling: Tiling = ctx.tiling
        if grad_output is None:
            grad_output = value.new_zeros(*query.shape[:2], value.shape[-1])
        if torch.is_grad_enabled():
            return None, *_twice(tiling, (query, key, value), learned, grad_output, grad_state)
        grads = [torch.zeros_like(t) for t in (query, key, value, *learned)]
        for tile in tiling.tiles():
            _backward_tile(tiling, tile, (query, key, value, state), learned, (grad_output, grad_state), grads)
        return None, *grads


def _twice(
    tiling: Tiling, vectors: tuple[Tensor, ...], learned: list[Tensor], grad_output: Tensor, grad_state: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The same gradients through the composite, so that they can be differentiated again."""
    inputs = [t for t in (*vectors, *learned) if t.requires_grad]
    output, state = tiling.composite(*vectors)
    outputs, grads = ((output,), (grad_output,)) if grad_state is None else ((output, state), (grad_output, grad_state))
    found = iter(torch.autograd.grad(outputs, inputs, grads, create_graph=True, allow_unused=True))
    return tuple(next(found) if t.requires_grad else None for t in (*vectors, *learned))


def _backward_tile(
    tiling: Tiling,
    tile: Tile,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    learned: list[Tensor],
    grads_in: tuple[Tensor, Tensor | None],
    grads: list[Tensor],
) -> None:
    """Add one tile's gradients to those of query, key, value and the learned tensors."""
    *vectors, state = saved
    cells, rows, columns = _slice(tile.cells), _slice(tile.rows), _slice(tile.columns)
    query, key, value = tile.take(*vectors)
    query, key = query.detach().requires_grad_(), key.detach().requires_grad_()
    bias = _BiasPiece.of(tiling.call.bias, tile, tiling.call.sizes.heads)
    with torch.enable_grad():
        part = tiling.part(tile.cells)
        part = part if bias is None else replace(part, bias=Given(bias.piece))
        scores = part.scores_of(query, key, tile.rows, tile.columns)
    weights = part.normalization.weights(scores.detach(), state[cells, None, rows])
    d_output = grads_in[0][cells, None, rows]
    kept = tiling.kept(tile, weights)
    d_weights = d_output @ value.mT
    grads[2][cells, columns] += ((weights if kept is None else weights * kept).mT @ d_output).squeeze(1)
    d_state = None if grads_in[1] is None else grads_in[1][cells, None, rows]
    d_scores = part.normalization.gradient(weights, d_weights if kept is None else d_weights * kept, d_state)
    sources = [t for t in learned if bias is None or t is not bias.whole]
    inputs = [query, key, *sources, *([] if bias is None else [bias.piece])]
    found = torch.autograd.grad(scores, inputs, d_scores, allow_unused=True)
    grads[0][cells, rows] += found[0].squeeze(1)
    grads[1][cells, columns] += found[1].squeeze(1)
    for whole, gradient in zip(sources, found[2:], strict=False):
        if gradient is not None:
            grads[3 + _index_of(learned, whole)] += gradient
    if bias is not None:
        bias.add_gradient(found[-1], grads[3 + _index_of(learned, bias.whole)])


@dataclass(frozen=True, slots=True, eq=False)
class _BiasPiece:
    """The part of a learned dense bias that a tile reads, as a leaf of its own.

    Differentiating a slice of the whole would make a zero tensor of the whole for every tile.
    """

    whole: Tensor
    piece: Tensor
    batches: Tensor
    heads: Tensor
    rows: slice
    columns: slice

    @classmethod
    def of(cls, bias: Bias | None, tile: Tile, heads: int) -> "_BiasPiece | None":
        """The piece, if the bias is dense and learned."""
        if not isinstance(bias, Dense) or not bias.tensor.requires_grad:
            return None
        cells = torch.arange(tile.cells.start, tile.cells.stop, device=bias.tensor.device)
        shape = bias.tensor.shape
        batches = cells // heads if shape[0] > 1 else 0 * cells
        in_heads = cells % heads if shape[1] > 1 else 0 * cells
        rows = _slice(tile.rows) if shape[2] > 1 else slice(None)
        columns = _slice(tile.columns) if shape[3] > 1 else slice(None)
        piece = bias.tensor.detach()[:, :, rows, columns][batches, in_heads].unsqueeze(1).requires_grad_()
        return cls(bias.tensor, piece, batches, in_heads, rows, columns)

    def add_gradient(self, gradient: Tensor, to: Tensor) -> None:
        """Add the piece's gradient where it came from; cells that read the same place add up."""
        to[:, :, self.rows, self.columns].index_put_((self.batches, self.heads), gradient.squeeze(1), accumulate=True)


def _index_of(tensors: list[Tensor], wanted: Tensor) -> int:
    return next(n for n, tensor in enumerate(tensors) if tensor is wanted)


def _slice(where: range) -> slice:
    return slice(where.start, where.stop)
