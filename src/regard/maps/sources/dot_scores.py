"""The scores of a softmax of dot products, as factors or in blocks, to base 2 and without gradients."""

import math
from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import fields

import torch
from torch import Tensor

from regard.call.masks.base import Mask
from regard.call.masks.basic import Causal
from regard.call.masks.patterns import Strided, Window
from regard.call.shapes import Rows, repeated, take, take_rows
from regard.kernels.base import Call
from regard.maps.sources.source import Piece

NEVER = 1e30
"""The state of a row without keys: its weights become 0, and no inf - inf or 0 * inf makes a NaN."""
LN_2 = math.log(2)
"""Converts logarithms. Weights are computed as powers of 2, because on the CPU `exp` of float32 takes up to 170 times
as long if its result is nearly 0.
"""

IN_NUMBERS: dict[type[Mask], tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind)) for kind in (Causal, Strided, Window)
}
"""Masks defined by their fields, by name; these are Python numbers where the mask is relative."""


def _bias_of(call: Call, rows: Rows, columns: Rows, dtype: torch.dtype) -> Tensor:
    assert call.bias is not None
    # In the map's dtype, as everywhere: a bias of the vectors would round in half precision.
    query, key = take(call.query, rows).to(dtype), take(call.key, columns).to(dtype)
    key = repeated(key, call.sizes.heads)
    return call.bias.block(rows, columns, query=query, key=key, sizes=call.sizes).to(dtype)


def _covered(call: Call, rows: Rows, columns: Rows) -> int:
    mask = call.mask
    if mask is None:
        return len(columns)
    if not isinstance(rows, range) or not isinstance(columns, range):
        return 0
    return bisect_left(range(1, len(columns) + 1), True, key=lambda count: not mask.covers(rows, columns[:count]))


class DotScores:
    """The scores behind weights 2^(scale q k + added - state / ln 2), in float32 or float64."""

    def __init__(self, call: Call, state: Tensor, scale: float) -> None:
        self._call, self.scale, self.state = call, scale / LN_2, state
        self.query, self.key = call.query.to(call.compute_dtype), call.key.to(call.compute_dtype)

    @property
    def reads_queries(self) -> bool:
        return self._call.bias is not None or "query" in self._looks

    @property
    def breadth(self) -> int:
        """The number of (sequence, head) pairs with their own additions."""
        sizes = self._call.sizes
        if self._call.bias is not None:
            return sizes.flat_batch * sizes.heads
        return (sizes.flat_batch if "batch" in self._looks else 1) * (sizes.heads if "head" in self._looks else 1)

    @property
    def is_relative(self) -> bool:
        """Whether the additions depend on key - query alone: then all blocks on a diagonal are equal."""
        return self._call.bias is None and self._call.mask is not None and self._call.mask.is_relative()

    @property
    def kind(self) -> Hashable:
        """The masks as a cache key, for scores of equal sizes; None if they hold tensors, or there is a bias."""
        call = self._call
        masks = () if call.mask is None else call.mask.factors()
        if call.bias is not None or not all(type(mask) in IN_NUMBERS and mask.is_relative() for mask in masks):
            return None
        return tuple((type(mask), *(getattr(mask, name) for name in IN_NUMBERS[type(mask)])) for mask in masks)

    @property
    def _looks(self) -> frozenset[str]:
        return frozenset() if self._call.mask is None else self._call.mask.depends_on()

    def allows(self, rows: range, columns: range) -> bool:
        call = self._call
        return call.bias is None and (call.mask is None or call.mask.covers(rows, columns))

    def added(self, rows: range, columns: range) -> Tensor:
        """The additions to the scores, (B or 1, H or 1, t or 1, s or 1); -NEVER for a hidden key."""
        call = self._call
        added = self.query.new_zeros(1, 1, 1, len(columns))
        if call.bias is not None:
            added = (_bias_of(call, rows, columns, self.query.dtype) / LN_2).clamp_min(-NEVER)
        if call.mask is not None:
            added = torch.where(call.allowed(call.mask, rows, columns), added, -NEVER)
        return added


class BufferedPart:
    """The parts of all heads share the buffers and the vectors; each block overwrites the memory of the last."""

    def __init__(self, call: Call, scale: float, factors: "DotFactors", flat_heads: range) -> None:
        self._scale, self._factors = scale / LN_2, factors
        self._query = factors.query[flat_heads.start : flat_heads.stop]
        self._key = factors.key_of(flat_heads).mT
        self._state = factors.state[flat_heads.start : flat_heads.stop]
        looks = frozenset() if call.mask is None else call.mask.depends_on()
        if call.bias is not None or looks & {"batch", "head"}:
            call = call.select(torch.arange(flat_heads.start, flat_heads.stop, device=self._state.device))
        self._call = call

    def __call__(self, rows: Rows, columns: Rows) -> Piece:
        logs = self._scores(rows, columns)
        logs -= take_rows(self._state, rows)[..., None]
        return Piece(self._factors.exponentials(logs), logs, LN_2, is_scratch=True)

    def _scores(self, rows: Rows, columns: Rows) -> Tensor:
        query, key = take_rows(self._query.mT, rows).mT, take_rows(self._key, columns)
        scores = self._factors.buffer((len(query), query.shape[1], key.shape[2]))
        torch.baddbmm(scores, query, key, beta=0, alpha=self._scale, out=scores)
        call = self._call
        if call.bias is not None:
            scores.add_(_bias_of(call, rows, columns, scores.dtype).squeeze(1), alpha=1 / LN_2)
            scores.clamp_min_(-NEVER)
        if call.mask is not None:
            covered = _covered(call, rows, columns)
            if covered < len(columns):
                hidden = ~call.allowed(call.mask, rows, columns[covered:])
                scores[..., covered:].unsqueeze(1).masked_fill_(hidden, -NEVER)
        return scores


class DotFactors:
    """The vectors and the row state of all flat_heads in the map's dtype, and two buffers for blocks."""

    def __init__(self, call: Call, state: Tensor) -> None:
        dtype = call.compute_dtype
        self.group = call.group
        self.query, self.key = (t.to(dtype).flatten(0, 1) for t in (call.query, call.key))
        state = state.flatten(0, 1)
        self.state = (state / LN_2).masked_fill(state == -torch.inf, NEVER)
        self._logs = self._weights = self.query.new_empty(0)

    def key_of(self, flat_heads: range) -> Tensor:
        """The keys of each flat_head: those of its batch row and its key head."""
        if self.group == 1:
            return self.key[flat_heads.start : flat_heads.stop]
        # The number of key heads divides that of heads: flat_head // group is the flat key head.
        return self.key[torch.arange(flat_heads.start, flat_heads.stop, device=self.key.device) // self.group]

    def buffer(self, shape: tuple[int, int, int]) -> Tensor:
        """A tensor of a shape in reused memory, many times faster than new pages."""
        count = math.prod(shape)
        if self._logs.numel() < count:
            self._logs = self.query.new_empty(count)
        return self._logs[:count].view(shape)

    def exponentials(self, logs: Tensor) -> Tensor:
        """2^logs, in reused memory."""
        if self._weights.numel() < logs.numel():
            self._weights = self.query.new_empty(self._logs.numel())
        return torch.exp2(logs, out=self._weights[: logs.numel()].view_as(logs))
