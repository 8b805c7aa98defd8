"""Observe FlexAttention: queries and keys with their score and mask functions.

Uncompiled, torch passes the call to an operator of higher order, which is observed like any function. Compiled calls
are invisible; while torch compiles one under a watch, the mode adds to the graph that the operator's arguments go into
a list after each run. Its kernel stays the same, and so do the bits.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.call.biases.base import BlockBias
from regard.call.masks.base import Mask
from regard.call.masks.basic import predicate
from regard.call.normalizations import Softmax
from regard.call.scores.base import ScaledDot, Score
from regard.call.scores.custom import Custom
from regard.call.shapes import Rows, Sizes
from regard.functional import make_call
from regard.kernels.base import Call
from regard.kernels.snapshot import with_snapshot
from regard.tensors.guards import has_torch_functions
from regard.tensors.torch_private import EnableTorchFunction
from regard.tensors.undisturbed import undisturbed
from regard.watching.kept.mask_reading import read_mask
from regard.watching.readers.attention_calls import AttentionCall
from regard.watching.readers.functions import Args, Func, Kwargs
from regard.watching.readers.traced_calls import after
from regard.watching.running.thread_state import ThreadState

PARTIAL, FULL = 1, 2
Allowed = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class BlockLists:
    """The kind of each block of a `BlockMask`: PARTIAL, FULL, or 0 for an unlisted one.

    A compiled FlexAttention asks its `mask_mod` in partial blocks alone. It takes all pairs of a full block, and none
    of an unlisted one. The lists may say something else than the function, as after `block_mask.mask_mod` was replaced.
    """

    kinds: Tensor
    """(B or 1, H or 1, blocks of queries, blocks of keys), uint8."""
    queries: int
    """The queries of a block,"""
    keys: int
    """and its keys."""

    @classmethod
    def of(cls, block_mask: tuple[Any, ...]) -> "BlockLists":
        """Read the tuple that FlexAttention's operator gets: the counts and indices of partial blocks, those of full
        ones, and at its end the sizes of a block and the function."""
        partial_count, partial, full_count, full = block_mask[2:6]
        kinds = torch.zeros(partial.shape, dtype=torch.uint8, device=partial.device)
        for kind, count, indices in ((PARTIAL, partial_count, partial), (FULL, full_count, full)):
            if count is not None:
                listed = torch.arange(indices.shape[-1], device=indices.device) < count[..., None]
                # Places beyond the count may repeat a listed block: they leave it as it is.
                kinds.scatter_reduce_(-1, indices.long(), (listed * kind).to(kinds.dtype), "amax")
        return cls(kinds, int(block_mask[-3]), int(block_mask[-2]))

    def over(self, allowed: Allowed) -> Allowed:
        batches, heads, rows, columns = self.kinds.shape

        def visited(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            row = (query // self.queries).clamp_max(rows - 1)
            column = (key // self.keys).clamp_max(columns - 1)
            kind = self.kinds[batch.clamp_max(batches - 1), head.clamp_max(heads - 1), row, column]
            return (kind == FULL) | ((kind == PARTIAL) & allowed(batch, head, query, key))

        return visited


MOST_PAIRS = 1 << 22
"""The most pairs of a mask rendered, once, to recognise a causal mask, a window, or padding."""

Function = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Modified(BlockBias):
    """The scores of a call with a `score_mod`: the function of the scaled dot product and of the places of a pair."""

    function: Function
    scale: float
    batches: Tensor | None = None
    """The batch row of each chosen pair of batch and head,"""
    heads: Tensor | None = None
    """and its head."""
    reads_vectors: bool = True

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        device = query.device
        i, j = (torch.as_tensor(part, device=device) if isinstance(part, Tensor) else
                torch.arange(part.start, part.stop, device=device) for part in (rows, columns))  # fmt: skip
        batch, head = self._cell(query.shape[0], query.shape[1], device)
        return self._scores(query @ key.mT, batch, head, i[:, None], j)

    def pairs(self, rows: Tensor, columns: Tensor, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        batch, head = self._cell(query.shape[1], query.shape[2], query.device)
        i, j = (part[:, None, None, None, None] for part in (rows, columns))
        return self._scores(query @ key.mT, batch, head, i, j)

    def select(self, batches: Tensor, heads: Tensor) -> "Modified":
        if self.batches is not None and self.heads is not None:
            return replace(self, batches=self.batches[batches], heads=self.heads[batches])
        return replace(self, batches=batches, heads=heads)

    def _cell(self, batch: int, heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self.batches is not None and self.heads is not None:
            return self.batches[:, None, None, None], self.heads[:, None, None, None]
        return (torch.arange(batch, device=device)[:, None, None, None],
                torch.arange(heads, device=device)[:, None, None])  # fmt: skip

    def _scores(self, dots: Tensor, *where: Tensor) -> Tensor:
        return of_pairs(self.function, dots * self.scale, *where)


def of_pairs(function: Function, *parts: Tensor) -> Tensor:
    """A function of scalars (a score, indices), applied to tensors that broadcast together."""
    from regard.tensors.torch_private import TransformGetItemToIndex

    parts = torch.broadcast_tensors(*parts)
    with ExitStack() as stack:
        if not has_torch_functions():
            stack.enter_context(EnableTorchFunction())
        # A tensor in the function's closure is indexed at traced positions, which torch allows within this mode.
        stack.enter_context(TransformGetItemToIndex())
        found: Tensor = torch.vmap(function)(*(part.reshape(-1) for part in parts))
    return found.reshape(parts[0].shape)


@dataclass(slots=True, kw_only=True, eq=False)
class FlexCall(AttentionCall):
    score_mod: Function
    mask_mod: Function
    scale: float
    captured: tuple[Tensor, ...] = ()
    blocks: BlockLists | None = None
    """The block lists that decided; None if the function alone did."""

    def computed(self) -> tuple[Tensor, Tensor]:
        query, key = self.query, self.key
        return query, key.expand(query.shape[0], -1, -1, -1) if key.shape[0] < query.shape[0] else key

    def call_of(self, query: Tensor, key: Tensor) -> Call:
        plain = _is_identity(self.score_mod)
        score: Score = ScaledDot(self.scale) if plain else Custom(changed_by_score_mod)
        call, _ = make_call(
            query, key, key, score=score, normalization=Softmax(), mask=None, bias=None, dropout=0.0
        )  # fmt: skip
        bias = None if plain else Modified(self.score_mod, self.scale)
        return with_snapshot(replace(call, bias=bias, mask=self._mask(call.sizes, query.device)), self.captured)

    def _mask(self, sizes: Sizes, device: torch.device) -> Mask | None:
        mod = self.mask_mod

        def flex_mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return of_pairs(mod, batch, head, query, key)

        mask = predicate(flex_mask_mod if self.blocks is None else self.blocks.over(flex_mask_mod)).bind(sizes, device)
        if sizes.flat_batch * sizes.heads * sizes.queries * sizes.keys > MOST_PAIRS:
            return mask
        with undisturbed():
            given = read_mask(mask.dense(sizes, device=device), sizes)
        return mask if given.dense is not None or given.bias is not None else given.mask


def changed_by_score_mod(query: Tensor, key: Tensor) -> Tensor:
    return query.new_zeros(*query.shape[:-1], key.shape[-2])


def _is_identity(score_mod: Function) -> bool:
    if isinstance(score_mod, torch.fx.GraphModule):
        nodes = list(score_mod.graph.nodes)
        return all(n.op in ("placeholder", "output") for n in nodes) and nodes[-1].args[0] in (nodes[0], (nodes[0],))
    # transformers makes a function that branches on its closure, and often returns the score. It cannot branch on its
    # arguments, because torch maps it over them.
    probe, place = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    try:
        return score_mod(probe, place, place, place, place) is probe
    except Exception:
        return False


def _with(function: Function, captured: tuple[Any, ...]) -> Function:
    return function if not captured else lambda *places: function(*places, *captured)


@after
def observe_flex(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    thread.handed.add(result[0].data_ptr())
    give_flex(thread, args, result[0], None)


def hand_on_compiled(thread: ThreadState) -> None:
    calls, module = list(thread.compiled), thread.stack[-1].module if thread.stack else None
    thread.compiled.clear()
    # Calls torch runs while it compiles are recorded too, and were seen already.
    calls = [(args, output) for args, output in calls if output.data_ptr() not in thread.handed]
    thread.handed.clear()
    for args, output in calls:
        if module is not None:
            thread.try_to(give_flex, thread, args, output, module)


def give_flex(thread: ThreadState, args: Args, output: Tensor, module: nn.Module | None) -> None:
    query, key, value, score_mod, block_mask, scale, _, *buffers = args
    mods, masks = (tuple(buffers[n]) if len(buffers) > n else () for n in (0, 1))
    how = "flex_attention" if module is None else "flex_attention, compiled"
    call = FlexCall(
        query=query, key=key, value=value, score_mod=_with(score_mod, mods), mask_mod=_with(block_mask[-1], masks),
        scale=float(scale), output=output, how=how, origins=thread.streams.origins(query, key),
        blocks=None if module is None else BlockLists.of(block_mask), captured=(*mods, *masks),
    )  # fmt: skip
    thread.streams.follow(output, query)
    if mods == () and _is_identity(score_mod):
        call.score_mod = score_mod
    thread.give(call, module)
