"""The plan of a mask for a fused kernel: a flag, a bias per key, or successive blocks of queries.

A kernel takes an additive mask, and a causal flag from the first key on. A dense additive mask would cost T x S
elements. So the mask is split into its factors. Factors by key alone become a bias of shape (B, 1, 1, S). Causality
from the first key becomes the flag. The other factors are rendered from their predicates for one block of queries at a
time, over the block's visible keys: in the forward pass, and again in the backward pass.

A block drops factors without effect in it: inside a document there is no mask, and the causal block of a document takes
the flag. A mask by key - query alone is equal for all blocks along a diagonal: it is rendered once, and equal
neighbours go to the kernel together, as rows of a batch. The cuts depend on the mask alone.

Under causality a mask or bias of a few queries would cost all others the flag. So all queries run with the flag,
without such a mask, and these few then run again, with it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from regard.call.biases.base import Bias, DenseBias
from regard.call.masks.base import And, Mask
from regard.call.masks.basic import causal_offset
from regard.call.shapes import Sizes
from regard.kernels.base import Call
from regard.kernels.fused_kernels import CHUNK_ELEMENTS, NOTHING_ADDED, AdditiveMask, Buffer, by_chunks
from regard.tensors.guards import can_look, is_compiling, run_state
from regard.tensors.tensor_tree import tensors_of_tree
from regard.tensors.tile_sizes import fitting, ranges

BLOCK_ELEMENTS = 1 << 22
"""The most elements of a block's additive mask: 16 MiB in float32."""
BLOCK_ROWS = (32, 128, 256, 512)
"""Queries in a block: first the fewest, then the candidates for the least work."""
CUT_ROWS = 128
"""The fewest queries of a block that ends at a cut: smaller blocks cost more in calls than they save in pairs."""
MOST_JOINED = 65_535
"""Joined blocks are rows of a batch, up to the limit of CUDA's kernels."""
FEW = 4
"""A mask of few queries concerns at most one in so many."""
PAIRS_A_CALL = 1 << 16
"""The fixed cost of a kernel call, as the number of pairs computed in the same time."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    rows: range
    columns: range
    is_causal: bool = False
    """Whether the kernel's flag is on: row i of the block sees its keys up to i."""
    factors: tuple[Mask, ...] = ()
    count: int = 1
    """The number of joined blocks: the queries and keys of each are len(rows) further on, under the same mask."""
    has_bias: bool = True

    @property
    def mask(self) -> Mask | None:
        return None if not self.factors else self.factors[0] if len(self.factors) == 1 else And(self.factors)

    def looks_at_queries(self, bias: Bias | None) -> bool:
        of_bias = bias is not None and bias.per_key is None
        return of_bias or any("query" in mask.depends_on() for mask in self.factors)

    @property
    def place(self) -> object:
        """The block's place in a mask by key - query alone: such masks are equal at equal places."""
        return self.factors, len(self.rows), len(self.columns), self.columns.start - self.rows.start

    def continues(self, last: "Block") -> bool:
        step = len(last.rows)
        return (
            self.rows == _moved(last.rows, step * last.count)
            and self.columns == _moved(last.columns, step * last.count)
            and self.is_causal == last.is_causal
            and self.factors == last.factors
            and all(mask.is_relative() for mask in self.factors)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    blocks: tuple[Block, ...]
    bias: Bias | None
    per_row: Tensor | None
    """The true scores minus the scores of the kernel, one value for each row: (B or 1, H or 1, T)."""
    sizes: Sizes
    dtype: torch.dtype
    device: torch.device
    anew: tuple[Block, ...] = ()
    """Blocks of queries run once more after the others, with further masks; their results stand."""
    repeated: frozenset[object] = frozenset()
    """The places of blocks that occur more than once; their masks, by key - query alone, are cached."""
    _rendered: dict[object, AdditiveMask] = field(default_factory=dict)

    @property
    def every(self) -> tuple[Block, ...]:
        return (*self.blocks, *self.anew)

    @property
    def whole(self) -> Block | None:
        first = self.blocks[0]
        is_whole = not self.anew and len(self.blocks) == 1 == first.count and len(first.columns) == self.sizes.keys
        return first if is_whole else None

    @property
    def is_square(self) -> bool:
        """Whether blocks need no mask but the flag, for T = S: in others the kernels disagree on its alignment."""
        plain = self.bias is None and not any(block.factors for block in self.every)
        return plain and all(len(b.rows) == len(b.columns) for b in self.every if b.is_causal)

    def additive(self, block: Block, buffer: Buffer | None = None) -> AdditiveMask:
        """The kernel's additive mask for a block; the next one in this buffer, if there is one, may overwrite it."""
        if not self.repeated or block.place not in self.repeated:
            return self._render(block, buffer)
        if block.place not in self._rendered:
            self._rendered[block.place] = self._render(block, None)
        return self._rendered[block.place]

    def _render(self, block: Block, buffer: Buffer | None) -> AdditiveMask:
        bias = self.bias
        if bias is not None and (not block.has_bias or bias.is_zero(block.rows, block.columns)):
            bias = None
        if bias is None and len(block.factors) == 1 and not block.columns.start:
            # Two questions to the tensor of the mask would take as long as making it, for a short call.
            fewest = block.factors[0].fewest_first_keys()
            if fewest is not None and fewest >= len(block.columns):
                return NOTHING_ADDED
            if fewest is not None:
                allowed = block.factors[0].block(block.rows, block.columns, sizes=self.sizes, device=self.device)
                added = excluding(allowed, self.dtype)
                return AdditiveMask(added, None if fewest > 0 else live_rows(added, block))
        pairs = self.sizes.flat_batch * self.sizes.heads * len(block.rows) * len(block.columns)
        looks = can_look(torch.empty(0, device=self.device))
        if pairs > CHUNK_ELEMENTS and block.looks_at_queries(bias) and looks:
            step = fitting(CHUNK_ELEMENTS, _breadth(block.mask, bias, self.sizes) * len(block.columns))
            if step < len(block.rows):
                chunks = ranges(len(block.rows), step)
                return by_chunks(chunks, len(block.rows), lambda rows: self._tensor(block, bias, rows), buffer)
        if looks and pairs and bias is None and block.mask is not None and not block.is_causal:
            allowed = block.mask.block(block.rows, block.columns, sizes=self.sizes, device=self.device)
            fewest = int(allowed.sum(-1).min())
            if fewest == allowed.shape[-1]:
                return NOTHING_ADDED
            added = self._laid_out(excluding(allowed, self.dtype), block)
            return AdditiveMask(added, None if fewest > 0 else allowed.any(-1))
        tensor = self._tensor(block, bias, range(len(block.rows)))
        return NOTHING_ADDED if tensor is None else AdditiveMask(tensor, live_rows(tensor, block))

    def _tensor(self, block: Block, given: Bias | None, chosen: range) -> Tensor | None:
        """The additive mask of rows of a block, with its bias; None for zeros. Its last stride is 1: the CPU kernel
        would copy any other, expanded to B x H x T x S."""
        rows, columns, bias, mask = _moved(chosen, block.rows.start), block.columns, None, block.mask
        if given is not None:
            # A bias is at least as wide as the queries, whose values are not read.
            nothing = torch.empty(0, dtype=self.dtype, device=self.device)
            bias = given.block(rows, columns, query=nothing, key=nothing, sizes=self.sizes).detach()
            wide = bias.dtype == self.dtype or self.dtype == torch.float64
            bias = bias.to(self.dtype if wide else torch.float32)
        if mask is not None:
            allowed = mask.block(rows, columns, sizes=self.sizes, device=self.device)
            if bias is None and can_look(allowed) and bool(allowed.all()):
                return None
            bias = excluding(allowed, self.dtype) if bias is None else torch.where(allowed, bias, -torch.inf)
        return None if bias is None else self._laid_out(bias, block)

    @staticmethod
    def _laid_out(bias: Tensor, block: Block) -> Tensor:
        if bias.shape[-1] == len(block.columns) and bias.is_contiguous():
            return bias
        return bias.expand(*bias.shape[:-1], len(block.columns)).contiguous()


def excluding(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 for allowed pairs, and -inf for the others."""
    if dtype == torch.get_default_dtype():
        return torch.where(allowed, 0.0, -torch.inf)  # A tensor for the 0 would take a third of the time.
    return torch.where(allowed, torch.zeros((), dtype=dtype, device=allowed.device), -torch.inf)


def live_rows(additive: Tensor | None, block: Block) -> Tensor | None:
    """The rows of a block with a key: bool (B or 1, H or 1, t or 1); None for all."""
    if additive is None:
        return None
    # With the first key each row has one, with the flag too. A sum is above -inf if none of its terms is -inf.
    if can_look(additive) and additive[..., 0].sum().item() > -torch.inf:
        return None
    allowed = additive > -torch.inf
    if not block.is_causal:
        live = allowed.any(-1)
        return None if can_look(live) and bool(live.all()) else live
    # With the flag, row i sees the keys up to i. It has a key if the first allowed key is one of these.
    first = torch.where(allowed.any(-1), allowed.int().argmax(-1), len(block.columns))
    return first <= torch.arange(len(block.rows), device=additive.device)


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayout:
    blocks: tuple[Block, ...]
    anew: tuple[Block, ...] = ()
    repeated: frozenset[object] = frozenset()


def excluding_factors(call: Call) -> tuple[Mask, ...]:
    """Without causal masks that exclude nothing, as in a decoding step, whose only query sees every key."""
    if call.mask is None:
        return ()
    last, found = call.sizes.keys - 1, []
    for factor in call.mask.factors():
        offset = causal_offset(factor)
        if offset is None or offset < last:
            found.append(factor)
    return tuple(found)


def plan(call: Call) -> Plan:
    sizes, factors = call.sizes, () if call.mask is None else excluding_factors(call)
    bias, per_row = (None, None) if call.bias is None else _reduced(call, factors)
    flag = None
    of_all: list[Mask] = []
    for factor in factors:
        if flag is None and causal_offset(factor) == 0:
            flag = factor
        elif "query" not in factor.depends_on():
            of_all.append(factor)
    is_of_all = bias is None or bias.per_key is not None
    everything = Block(range(sizes.queries), range(sizes.keys), flag is not None, tuple(of_all), has_bias=is_of_all)
    if is_of_all and len(of_all) + everything.is_causal == len(factors):
        layout = BlockLayout((everything,))
    elif bias is None and are_numbers(factors) and run_state(call.query).runs_eagerly:
        layout = _cached_layout(factors, everything.is_causal, sizes, _limits())
    else:
        layout = _layout(factors, bias, everything, sizes)
    dtype, device = call.query.dtype, call.query.device
    return Plan(layout.blocks, bias, per_row, sizes, dtype, device, layout.anew, layout.repeated)


def are_numbers(factors: tuple[Mask, ...]) -> bool:
    """Whether masks consist of Python numbers alone: then equal ones are the same mask."""
    return all(type(mask).__hash__ is not object.__hash__ for mask in factors) and not tensors_of_tree(factors)


def _limits() -> tuple[object, ...]:
    return BLOCK_ELEMENTS, BLOCK_ROWS, CUT_ROWS, MOST_JOINED, FEW, PAIRS_A_CALL


@lru_cache(maxsize=256)
def _cached_layout(factors: tuple[Mask, ...], is_causal: bool, sizes: Sizes, limits: tuple[object, ...]) -> BlockLayout:
    of_all = tuple(m for m in factors if "query" not in m.depends_on())
    everything = Block(range(sizes.queries), range(sizes.keys), is_causal, of_all)
    return _layout(factors, None, everything, sizes)


def _layout(factors: tuple[Mask, ...], bias: Bias | None, everything: Block, sizes: Sizes) -> BlockLayout:
    anew = _of_few(factors, bias, everything, sizes) if everything.is_causal else None
    if anew is not None:
        return BlockLayout((everything,), anew, _repeated((everything,), bias))
    blocks = _least_work(factors, bias, sizes)
    blocks = blocks if bias is not None else tuple(_joined(blocks, MOST_JOINED // max(1, sizes.flat_batch)))
    return BlockLayout(blocks, (), _repeated(blocks, bias))


def _of_few(factors: tuple[Mask, ...], bias: Bias | None, everything: Block, sizes: Sizes) -> tuple[Block, ...] | None:
    """Blocks of the few queries with more masks, or a bias, than all queries have; None if they are not few."""
    more = [m for m in factors if causal_offset(m) != 0 and m not in everything.factors]
    own = None if everything.has_bias else bias
    found: list[range] = []
    for rows in _rows([], sizes.queries, BLOCK_ROWS[0]):
        if all(m.covers(rows, everything.columns) for m in more) and (
            own is None or own.is_zero(rows, everything.columns)
        ):
            continue
        found.append(rows)
        if FEW * sum(map(len, found)) > sizes.queries:
            return None
    mask = And(factors)
    return tuple(_blocks(factors, bias, [(rows, mask.key_range(rows, sizes)) for rows in found]))


def _repeated(blocks: tuple[Block, ...], bias: Bias | None) -> frozenset[object]:
    if is_compiling() or bias is not None:
        return frozenset()
    places = Counter(b.place for b in blocks if b.factors and all(mask.is_relative() for mask in b.factors))
    return frozenset(place for place, count in places.items() if count > 1)


def _reduced(call: Call, factors: tuple[Mask, ...]) -> tuple[Bias | None, Tensor | None]:
    if call.bias is None:
        return None, None
    # With a mask aligned to the end, query i is at position S - T + i. "Causal" means that it sees no key after that
    # position.
    end = call.sizes.keys - call.sizes.queries
    causal = any((offset := causal_offset(m)) is not None and offset <= end for m in factors)
    split = call.bias.split(call.sizes, call.query.device, causal=causal)
    return (call.bias, None) if split is None else (DenseBias(split[0]), split[1])


def _least_work(factors: tuple[Mask, ...], bias: Bias | None, sizes: Sizes) -> tuple[Block, ...]:
    mask = None if not factors else And(factors)
    fewest, *steps = BLOCK_ROWS
    most = fewest * fitting(BLOCK_ELEMENTS, _breadth(mask, bias, sizes) * sizes.keys * fewest)
    cuts = [] if mask is None else mask.row_cuts(sizes)
    # If the blocks between two cuts need no rendering, they are taken whole.
    natural = tuple(_blocks(factors, bias, _ranges(mask, cuts, sizes, sizes.queries))) if cuts and bias is None else ()
    if natural and not any(block.factors for block in natural):
        return natural
    tried = [_ranges(mask, cuts, sizes, min(step, most)) for step in steps]
    flat_heads = sizes.flat_batch * sizes.heads
    # Two steps for the minimum, because torch.compile cannot trace min with a key.
    work = [sum([PAIRS_A_CALL + flat_heads * len(i) * len(j) for i, j in ranges]) for ranges in tried]
    return tuple(_blocks(factors, bias, tried[work.index(min(work))]))


def _breadth(mask: Mask | None, bias: Bias | None, sizes: Sizes) -> int:
    axes: frozenset[str] = frozenset() if mask is None else mask.depends_on()
    batch_of_bias, heads_of_bias = bias.tensor.shape[:2] if isinstance(bias, DenseBias) else (1, sizes.heads)
    batch = sizes.flat_batch if "batch" in axes else 1 if bias is None else batch_of_bias
    heads = sizes.heads if "head" in axes else 1 if bias is None else heads_of_bias
    return batch * heads


def _ranges(mask: Mask | None, cuts: list[int], sizes: Sizes, step: int) -> list[tuple[range, range]]:
    every = range(sizes.keys)
    return [(rows, every if mask is None else mask.key_range(rows, sizes)) for rows in _rows(cuts, sizes.queries, step)]


def _blocks(factors: tuple[Mask, ...], bias: Bias | None, ranges: list[tuple[range, range]]) -> Iterator[Block]:
    for rows, columns in ranges:
        left = tuple(m for m in factors if columns and not m.covers(rows, columns))
        starts = [m for m in left if causal_offset(m) == columns.start - rows.start]
        if len(left) == len(starts) == 1 and (bias is None or bias.is_zero(rows, columns)):
            yield Block(rows, columns, is_causal=True)
        else:
            yield Block(rows, columns, factors=left)


def _joined(blocks: tuple[Block, ...], most: int) -> Iterator[Block]:
    last, *others = blocks
    for block in others:
        if block.columns and last.count < most and block.continues(last):
            last = replace(last, count=last.count + 1)
        else:
            yield last
            last = block
    yield last


def _moved(where: range, by: int) -> range:
    return range(where.start + by, where.stop + by)


def _rows(cuts: list[int], length: int, step: int) -> Iterator[range]:
    start = 0
    while start < length:
        limit = min(start + step, length)
        least = start + CUT_ROWS
        # torch.compile cannot trace bisect.
        first = sum(cut < least for cut in cuts) if is_compiling() else bisect_left(cuts, least)
        after = cuts[first : first + 1]
        stop = after[0] if after and after[0] <= limit else limit
        yield range(start, stop)
        start = stop
