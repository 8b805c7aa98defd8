"""How a fused kernel covers a mask: as a flag, as a bias per key, or block of queries by block of queries.

A kernel takes a flag for start-aligned causality and an additive mask. Handing it a dense mask would
cost T x S numbers, so a mask is split into its factors: what looks at keys alone becomes a bias of shape
(B, 1, 1, S); causality from the start becomes the flag; whatever remains is rendered from the predicate
for one block of queries at a time, over the keys that the block can see, forward and again in backward.
What is cut depends on the mask alone.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.backends.base import Call
from regard.biases import Bias, Dense
from regard.masks import And, Causal, Mask, render
from regard.shapes import Sizes

BLOCK_ELEMENTS = 1 << 22
"""Numbers that one block's additive mask may hold: 16 MiB in float32."""
BLOCK_ROWS = (32, 512)
"""Fewest and most queries in a block; 128 to 1,024 were equally fast on the CPU kernel."""

CUT_ROWS = 128
"""Queries that a block has at least before it ends at a cut: smaller ones cost more calls than they save."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some queries, the keys that they may see, and whether the kernel's causal flag is on."""

    rows: range
    columns: range
    is_causal: bool


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The blocks of a call, and what to add to the scores of each."""

    blocks: tuple[Block, ...]
    mask: Mask | None
    """What the causal flag does not say."""
    bias: Bias | None
    per_row: Tensor | None
    """What the true scores have above the kernel's, the same in a whole row: (B or 1, H or 1, T)."""
    sizes: Sizes
    dtype: torch.dtype
    device: torch.device

    @property
    def is_plain(self) -> bool:
        """Whether the flag says all there is to say."""
        return self.mask is None and self.bias is None

    def additive(self, block: Block) -> Tensor | None:
        """The kernel's additive mask for a block, (B or 1, H or 1, t or 1, s): -inf where excluded.

        Its last stride is 1: the CPU kernel would expand and copy any other to B x H x T x S.
        """
        rows, columns, bias = block.rows, block.columns, None
        if self.bias is not None:
            nothing = torch.empty(0, device=self.device)
            bias = self.bias.block(rows, columns, query=nothing, key=nothing, sizes=self.sizes).detach()
            wide = bias.dtype == self.dtype or self.dtype == torch.float64
            bias = bias.to(self.dtype if wide else torch.float32)
        if self.mask is not None:
            allowed = render(self.mask, rows, columns, sizes=self.sizes, device=self.device)
            # A block inside one document needs no mask; on a GPU the question would wait for the device.
            if bias is None and self.device.type == "cpu" and bool(allowed.all()):
                return None
            zero = torch.zeros((), dtype=self.dtype, device=self.device) if bias is None else bias
            bias = torch.where(allowed, zero, -torch.inf)
        return None if bias is None else bias.expand(*bias.shape[:-1], len(columns)).contiguous()


def live_rows(additive: Tensor | None, block: Block) -> Tensor | None:
    """Which rows of a block have a key: bool (B or 1, H or 1, t or 1); None if all do."""
    if additive is None:
        return None
    allowed = additive > -torch.inf
    if not block.is_causal:
        return allowed.any(-1)
    # With the flag, row i sees the keys up to i: it lives if the first allowed key is among them.
    first = torch.where(allowed.any(-1), allowed.int().argmax(-1), len(block.columns))
    return first <= torch.arange(len(block.rows), device=additive.device)


def plan(call: Call) -> Plan:
    """Split the call's mask into the flag, the bias per key, and blocks of queries."""
    factors = [] if call.mask is None else [m for m in call.mask.factors() if not _always(m, call.sizes)]
    flag = next((m for m in factors if _offset(m) == 0), None)
    others = [m for m in factors if m is not flag]
    bias, per_row = _per_key(call, factors)
    whole = all("query" not in m.depends_on() for m in others) and (bias is None or _rows_of(bias) == 1)
    kept = others if whole else factors
    mask = None if not kept else kept[0] if len(kept) == 1 else And(tuple(kept))
    everything = Block(range(call.sizes.queries), range(call.sizes.keys), flag is not None)
    blocks = (everything,) if whole else tuple(_blocks(mask, bias, call.sizes))
    return Plan(blocks, mask, bias, per_row, call.sizes, call.query.dtype, call.query.device)


def _offset(mask: Mask) -> int | None:
    return mask.offset if isinstance(mask, Causal) and isinstance(mask.offset, int) else None


def _always(mask: Mask, sizes: Sizes) -> bool:
    """Whether a causal mask excludes nothing, as for the one query of a decoding step."""
    offset = _offset(mask)
    return offset is not None and offset >= sizes.keys - 1


def _per_key(call: Call, factors: list[Mask]) -> tuple[Bias | None, Tensor | None]:
    """The bias reduced to one number per key where that is possible, and what each row lost by it."""
    if call.bias is None:
        return None, None
    # Where queries stand at S - T + i, as a mask aligned to the end has it, "causal" means no key after them.
    end = call.sizes.keys - call.sizes.queries
    causal = any((offset := _offset(m)) is not None and offset <= end for m in factors)
    split = call.bias.split(call.sizes, call.query.device, causal=causal)
    return (call.bias, None) if split is None else (Dense(split[0]), split[1])


def _rows_of(bias: Bias) -> int:
    return bias.tensor.shape[-2] if isinstance(bias, Dense) else -1


def _blocks(mask: Mask | None, bias: Bias | None, sizes: Sizes) -> Iterator[Block]:
    axes = frozenset() if mask is None else mask.depends_on()
    batch_of_bias, heads_of_bias = bias.tensor.shape[:2] if isinstance(bias, Dense) else (1, sizes.heads)
    batch = sizes.flat_batch if "batch" in axes else 1 if bias is None else batch_of_bias
    heads = sizes.heads if "head" in axes else 1 if bias is None else heads_of_bias
    fewest, most = BLOCK_ROWS
    step = min(most, max(fewest, BLOCK_ELEMENTS // max(1, batch * heads * sizes.keys) // fewest * fewest))
    for rows in _rows([] if mask is None else mask.row_cuts(sizes), sizes.queries, step):
        yield Block(rows, range(sizes.keys) if mask is None else mask.key_range(rows, sizes), False)


def _rows(cuts: list[int], length: int, step: int) -> Iterator[range]:
    """Blocks of at most `step` rows, each up to the first cut that leaves it CUT_ROWS rows."""
    start = 0
    while start < length:
        limit = min(start + step, length)
        after = cuts[bisect_left(cuts, start + CUT_ROWS) :][:1]
        stop = after[0] if after and after[0] <= limit else limit
        yield range(start, stop)
        start = stop
