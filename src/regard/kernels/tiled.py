"""Attention with any score, mask, normalization and learned bias, in memory linear in T and S.

A tile has a few queries of a few heads and all their visible keys. Its scores and weights exist only while it runs. The
backward pass recomputes them, tile by tile.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.call.normalizations import Softmax, any_coarse
from regard.call.shapes import repeated
from regard.kernels.base import BACKWARD, Backend, Call, require_same_rows
from regard.tensors.guards import (
    State,
    has_values,
    in_forward_mode,
    in_transform,
    is_compiling,
    is_exporting,
    is_recorded,
    is_transformed,
)
from regard.tensors.tile_sizes import fitting, ranges, tile_shape
from regard.tensors.torch_private import CHECKPOINTS_IN_TRANSFORMS

TILE_ELEMENTS = 1 << 20
"""Pairs of a query and a key in a tile: 4 MiB in float32, so a few tensors of that size fit the cache."""
WIDE_ELEMENTS = 1 << 21
"""Elements in a tile, for scores with several temporaries for each pair."""
MOST_UNROLLED = 32
"""The most tiles unrolled into a compiled graph: tracing one tile takes about 0.2 s."""
TILE_ROWS = 256
"""Queries of one head in a tile before it adds a second head: narrow matrix products are slow."""


class Tiled(Backend):
    """The arithmetic of the reference, on one tile at a time.

    It has every derivative of the reference, also second ones, in memory linear in the number of queries plus one tile.
    Dropout draws one seed, and the backward pass regenerates the random bits of each tile from it.
    """

    name = "tiled"

    def why_not(self, call: Call, state: State) -> str | None:
        if state.is_traced:
            return "torch.jit.trace would keep the tiles of this call's lengths for calls of other lengths"
        if state.is_transformed and in_transform("Grad"):
            return "torch.func.grad cannot look into the backward pass of the tiles; torch.autograd.grad can"
        if state.is_transformed and in_transform("Vmap") and state.is_recorded:
            return "torch.vmap cannot look into the backward pass of the tiles; under torch.no_grad() it need not"
        return None

    def run(self, call: Call, value: Tensor) -> tuple[Tensor, Tensor]:
        dtype, (batch, heads) = value.dtype, call.query.shape[:2]
        seed = _seed(call.query) if call.dropout else 0
        # Cast and repeat the key heads once here, not in every tile.
        call, value = call.expanded(), repeated(value.to(call.compute_dtype), heads)
        if call.bias is not None:
            call = replace(call, bias=call.bias.laid_out(call.sizes, call.query.device))
        tensors = (call.query.flatten(0, 1), call.key.flatten(0, 1), value.flatten(0, 1))
        tiling = Tiling(call, seed)
        if is_compiling():
            output, state = _run_compiling(tiling, tensors)
        else:
            output, state = _run(tiling, tensors)
        return output.unflatten(0, (batch, heads)).to(dtype), state.unflatten(0, (batch, heads))


def _run(tiling: "Tiling", tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    undeclared = is_recorded() and not tiling.call.score.is_declared
    if undeclared or in_forward_mode() or in_transform("Vmap"):
        return tiling.composite(*tensors)
    if not is_recorded():
        return tiling.run(*tensors)
    return _Tiles.apply(tiling, *tensors, *tiling.call.learned())


def _run_compiling(tiling: "Tiling", tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    if tiling.count <= MOST_UNROLLED:
        return tiling.composite(*tensors)
    from regard.kernels.graph_break import ungraphed

    return ungraphed(_run, tiling, tensors)


@dataclass(frozen=True, slots=True)
class Tile:
    """Some flat_heads (flat indices of batch and head), some of their queries, and the visible keys of these."""

    flat_heads: range
    rows: range
    columns: range

    def take(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views (flat_heads, 1, length, dim) of the tile's part of tensors (flat_heads, length, dim)."""
        flat_heads = _slice(self.flat_heads)
        rows, columns = _slice(self.rows), _slice(self.columns)
        return query[flat_heads, None, rows], key[flat_heads, None, columns], value[flat_heads, None, columns]


class Tiling:
    """A call divided into tiles. It keeps the objects of the call, but not its query and key."""

    def __init__(self, call: Call, seed: int | Tensor) -> None:
        self.seed = seed
        nothing = call.query.new_empty((*call.query.shape[:2], 0, 0))
        self.width = call.score.pair_width(call.query.shape[-1])
        self.call = replace(call, query=nothing, key=nothing)

    def tiles(self) -> Iterator[Tile]:
        sizes = self.call.sizes
        flat_heads, (few, rows) = sizes.flat_batch * sizes.heads, self._extent()
        for some in ranges(flat_heads, few):
            for block in ranges(sizes.queries, rows):
                yield self._tile(some, block)

    def parts(self) -> Iterator[tuple[Tile, Call]]:
        """All tiles, each with the call on its flat_heads; tiles of the same flat_heads share one such call."""
        last = part = None
        for tile in self.tiles():
            if part is None or tile.flat_heads != last:
                last, part = tile.flat_heads, self.part(tile.flat_heads)
            yield tile, part

    @property
    def count(self) -> int:
        few, rows = self._extent()
        return -(-self.call.sizes.flat_batch * self.call.sizes.heads // few) * -(-self.call.sizes.queries // rows)

    def _extent(self) -> tuple[int, int]:
        sizes = self.call.sizes
        flat_heads, row_size = sizes.flat_batch * sizes.heads, max(1, sizes.keys * self.width)
        budget = TILE_ELEMENTS if self.width == 1 else WIDE_ELEMENTS
        few, rows = tile_shape(flat_heads, sizes.queries, row_size, budget=budget, few_rows=TILE_ROWS)
        # If all flat_heads fit into the tile with room to spare, it takes more rows.
        return few, max(rows, fitting(budget, row_size * few, sizes.queries))

    def _tile(self, flat_heads: range, rows: range) -> Tile:
        sizes, mask = self.call.sizes, self.call.mask
        columns = range(sizes.keys) if mask is None else mask.key_range(rows, sizes)
        # A normalization needs at least one key. The mask still excludes this one.
        return Tile(flat_heads, rows, columns or range(1))

    def part(self, flat_heads: range) -> Call:
        sizes = self.call.sizes
        if sizes.heads == 1 and len(flat_heads) == sizes.flat_batch and self.call.bias is None:
            return self.call  # Its sequences are the flat_heads. (A selected bias has a gradient of its own.)
        return self.call.select(torch.arange(flat_heads.start, flat_heads.stop, device=self.call.query.device))

    def kept(self, tile: Tile, weights: Tensor) -> Tensor | None:
        dropout = self.call.dropout
        if not dropout:
            return None
        if isinstance(self.seed, Tensor):
            rows = torch.arange(tile.rows.start, tile.rows.stop, device=weights.device)[:, None]
            flat_heads = torch.arange(tile.flat_heads.start, tile.flat_heads.stop, device=weights.device)[
                :, None, None, None
            ]
            columns = torch.arange(tile.columns.start, tile.columns.stop, device=weights.device)
            rows = rows + flat_heads * self.call.sizes.queries
            return kept_at(self.seed.to(weights.device), rows, columns, dropout).to(weights.dtype) / (1.0 - dropout)
        seed = self.seed + tile.flat_heads.start * self.call.sizes.queries + tile.rows.start
        generator = torch.Generator(weights.device).manual_seed(seed)
        kept = torch.rand(weights.shape, generator=generator, dtype=torch.float32, device=weights.device) >= dropout
        return kept.to(weights.dtype) / (1.0 - dropout)

    def forward(
        self,
        tile: Tile,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: Call | None = None,
        proof: "Proof | None" = None,
    ) -> tuple[Tensor, Tensor]:
        """The output (flat_heads, t, E) and the row state (flat_heads, t) of a tile, from the vectors of the tile."""
        part = self.part(tile.flat_heads) if part is None else part
        weights, state = part.normalization.normalize(part.scores_of(query, key, tile.rows, tile.columns))
        if proof is not None:
            proof.compare(state)
        kept = self.kept(tile, weights)
        weights = weights if kept is None else weights * kept
        return (weights @ value).squeeze(1), state.squeeze(1)

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The output (flat_heads, T, E) and the row state (flat_heads, T) of all tiles."""
        outputs, states = [], []
        for tile, part in self.parts():
            output, state = self.forward(tile, *tile.take(query, key, value), part)
            outputs.append((tile, output))
            states.append((tile, state))
        return self.assemble(outputs), self.assemble(states)

    def assemble(self, pieces: list[tuple[Tile, Tensor]]) -> Tensor:
        if len(pieces) == 1:
            return pieces[0][1]
        by_flat_heads: dict[int, list[Tensor]] = {}
        for tile, piece in pieces:
            by_flat_heads.setdefault(tile.flat_heads.start, []).append(piece)
        return torch.cat([torch.cat(rows, dim=1) if len(rows) > 1 else rows[0] for rows in by_flat_heads.values()])

    def composite(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        outputs, states = [], []
        run: Callable[..., tuple[Tensor, Tensor]] = self.forward
        # An exported program has no backward pass, and a strict export cannot hold a checkpoint.
        goes_back = is_recorded() and not is_exporting()
        if goes_back and (CHECKPOINTS_IN_TRANSFORMS or not (in_forward_mode() or in_transform("Vmap"))):
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        for tile in self.tiles():
            vectors = tile.take(query, key, value)
            proof = None if self.call.snapshot is None or is_compiling() else Proof(self.call)
            output, state = run(tile, *vectors, None, proof)
            outputs.append((tile, output))
            states.append((tile, state))
        return self.assemble(outputs), self.assemble(states)


class Proof:
    """The row state of a checkpointed tile, which the backward pass computes again."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._state: Tensor | None = None

    def compare(self, state: Tensor) -> None:
        if self._state is None:
            self._state = state.detach()
            return
        self._call.require_same(BACKWARD, None)
        if has_values(state) and not is_transformed():
            require_same_rows(state, self._state, BACKWARD)


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tiling: Tiling, query: Tensor, key: Tensor, value: Tensor, *learned: Tensor
    ) -> tuple[Tensor, Tensor]:
        output, state = tiling.run(query, key, value)
        ctx.tiling = tiling
        ctx.save_for_backward(query, key, value, output, state, *learned)
        ctx.set_materialize_grads(False)
        return output, state

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, output, state, *learned = ctx.saved_tensors
        tiling: Tiling = ctx.tiling
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        if is_recorded():
            return None, *_twice(tiling, (query, key, value), learned, grad_output, grad_state)
        is_coarse = (
            tiling.call.bias is not None and isinstance(tiling.call.normalization, Softmax) and any_coarse(state)
        )
        inner = (grad_output * output).sum(-1)
        back = Back(tiling, (query, key, value), state, grad_output, grad_state, inner, is_coarse)
        return None, *back.gradients(learned)


@dataclass(frozen=True, slots=True)
class Back:
    tiling: Tiling
    vectors: tuple[Tensor, Tensor, Tensor]
    state: Tensor
    grad_output: Tensor
    grad_state: Tensor | None
    inner: Tensor
    """The dot product dO . O of each row."""
    is_coarse: bool = False
    """Whether some row state has lost the sum of its row. Weights are then normalised anew: tiles have whole rows."""

    def gradients(self, learned: Sequence[Tensor]) -> list[Tensor]:
        call = self.tiling.call
        of_score = len([t for t in call.score.learned() if t.requires_grad])
        # If the tiles write every element exactly once, zeros are unnecessary.
        is_written = call.bias is not None and call.bias.is_whole and call.mask is None
        grads = [torch.zeros_like(t) for t in (*self.vectors, *learned[:of_score])]
        grads += [torch.empty_like(t) if is_written else torch.zeros_like(t) for t in learned[of_score:]]
        halves = slice(0, of_score), slice(of_score, None)
        split = [(learned[half], grads[3:][half]) for half in halves]
        # Parameters selected for some heads must pass their gradient on to the whole tensor.
        with torch.enable_grad():
            parts = list(self.tiling.parts())
        for tile, part in parts:
            self._add(tile, part, grads, *split)
        return grads

    def _add(self, tile: Tile, part: Call, grads: list[Tensor], score: "Learned", bias: "Learned") -> None:
        flat_heads, rows, columns = _slice(tile.flat_heads), _slice(tile.rows), _slice(tile.columns)
        query, key, value = tile.take(*self.vectors)
        scores, pull = part.score.linearize(query, key, score[0])
        pull_bias = None
        if part.bias is not None:
            added, pull_bias = part.bias.linearize(
                tile.rows, tile.columns, query=query, key=key, sizes=part.sizes, learned=bias[0]
            )
            scores += added
        scores = part.masked_(scores, tile.rows, tile.columns)
        if part.snapshot is not None and part.snapshot.has_code:
            last = self.state[flat_heads, None, rows][..., -1:]
            require_same_rows(part.normalization.normalize(scores[..., -1:, :])[1], last, BACKWARD)
        state = self.state[flat_heads, None, rows]
        if self.is_coarse:
            weights = part.normalization.normalize(scores)[0]
        else:
            weights = part.normalization.weights_(scores, state)
        d_output = self.grad_output[flat_heads, None, rows]
        kept = self.tiling.kept(tile, weights)
        grads[2][flat_heads, columns] += ((weights if kept is None else weights * kept).mT @ d_output).squeeze(1)
        d_weights = d_output @ value.mT
        d_weights = d_weights if kept is None else d_weights.mul_(kept)
        d_state = None if self.grad_state is None else self.grad_state[flat_heads, None, rows]
        inner = self.inner[flat_heads, None, rows]
        d_scores = part.normalization.gradient(scores, state, weights, d_weights, d_state, inner)
        found = [pull_bias(d_scores, bias[1]) if pull_bias is not None else None, pull(d_scores, score[1])]
        for vectors in found:
            if vectors is not None:
                grads[0][flat_heads, rows] += vectors[0].squeeze(1)
                grads[1][flat_heads, columns] += vectors[1].squeeze(1)


Learned = tuple[Sequence[Tensor], Sequence[Tensor]]


def _twice(
    tiling: Tiling, vectors: tuple[Tensor, ...], learned: list[Tensor], grad_output: Tensor, grad_state: Tensor | None
) -> tuple[Tensor | None, ...]:
    inputs = [t for t in (*vectors, *learned) if t.requires_grad]
    output, state = tiling.composite(*vectors)
    outputs, grads = ((output,), (grad_output,)) if grad_state is None else ((output, state), (grad_output, grad_state))
    found = iter(torch.autograd.grad(outputs, inputs, grads, create_graph=True, allow_unused=True))
    return tuple(next(found) if t.requires_grad else None for t in (*vectors, *learned))


def _seed(query: Tensor) -> int | Tensor:
    """A seed for the generators of the tiles; a tensor if tensors have no values, as in a compiled graph."""
    seed = torch.randint(2**62, ())
    return int(seed.item()) if has_values(seed) and has_values(query) else seed


def _slice(where: range) -> slice:
    return slice(where.start, where.stop)


def kept_at(seed: Tensor, rows: Tensor, columns: Tensor, dropout: float) -> Tensor:
    """Whether each (row, column) is kept, with probability 1 - dropout. Equal seeds give equal answers.

    `seed` is an integer tensor of one element, and rows (..., t, 1), numbered on from one flat_head to the next, and
    columns (s,) are below 2^31. The counter row * 2^31 + column + seed goes through the finalizer of SplitMix64, in
    wrapping 64-bit arithmetic: a graph has no access to a generator's seed.

    Source: Steele, Lea & Flood 2014 (doi:10.1145/2660193.2660195), figure 16.

    >>> import torch
    >>> kept = kept_at(torch.tensor(7), torch.arange(1000)[:, None], torch.arange(1000), 0.3)
    >>> round(kept.float().mean().item(), 2)
    0.7
    """
    state = ((rows << 31) + columns + seed) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        # torch shifts copies of the sign in from the left; the mask clears them.
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * factor
    state = state ^ ((state >> 31) & ((1 << 33) - 1))
    return (state & 0xFFFFFF) >= int(dropout * (1 << 24))
