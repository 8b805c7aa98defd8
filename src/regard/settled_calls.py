"""Calls of a kind that was seen before: what they decide is kept, so that a short call takes few steps.

What is kept follows from shapes, dtypes and the kinds of masks alone, all of which are in the key: how the kernel
covers the mask, its scale, and where rows may have no key. No number of any tensor is kept. A call runs the same
kernel with the same arguments as it does without this, and so gives the same bits, and the same gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.backends import BACKENDS
from regard.backends.additive_masks import AdditiveMask
from regard.backends.base import Call
from regard.backends.fused import Again, whole_call
from regard.backends.fused_kernels import CpuFlash, OneBlock, repeated
from regard.backends.kernel_arguments import causal_offset, excluding_factors
from regard.backends.short_sequences import ShortSequences, takes_short_sequences
from regard.mechanisms.checks import IS_CHECKING
from regard.mechanisms.masks.base import And, Mask
from regard.mechanisms.masks.basic import Causal, Lengths
from regard.mechanisms.normalizations import Softmax
from regard.mechanisms.readable import PLAIN
from regard.mechanisms.scores.base import ScaledDot
from regard.mechanisms.shapes import Sizes
from regard.torch_private import (
    CPU_TAKES_GROUPS,
    count_dispatch_modes,
    flash_cpu_alone,
    forward_level,
    get_function_mode,
    is_tracing,
    peek_interpreter_stack,
)

CallKind = tuple[Any, ...]
MOST = 512
"""How many kinds are kept; beyond them all are forgotten."""
SEEN: dict[CallKind | None, "Settled | None"] = {}
"""What calls of each kind decide; None for kinds that go the long way, and no kind that cannot be told is in it."""
# (Behind a long call each step to a name is a wait for memory: these are asked for in every call.)
_is_compiling = torch.compiler.is_compiling
_is_autocast_enabled, _is_grad_enabled = torch.is_autocast_enabled, torch.is_grad_enabled
_NOTHING_ADDED = AdditiveMask(None, None)


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """What calls of one kind decide."""

    sizes: Sizes
    scale: float
    is_causal: bool
    positions: Tensor | None
    """The positions of the keys (S,), if the mask has lengths."""
    numbers: tuple[Tensor, Tensor] | None
    """0 and -inf in the dtype of the mask."""

    def run(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None) -> tuple[Tensor, Tensor]:
        """The output (B, H, T, E) and the log-sum-exp (B, H, T), -inf for a row with no key."""
        if not CPU_TAKES_GROUPS:
            key, value = repeated(query, key), repeated(query, value)
        if self.positions is None:
            return flash_cpu_alone(query, key, value, 0.0, self.is_causal, scale=self.scale)
        added = self._added(mask)
        output, lse = flash_cpu_alone(query, key, value, 0.0, self.is_causal, attn_mask=added.tensor, scale=self.scale)
        return output, lse if added.live is None else lse.masked_fill(~added.live, -torch.inf)

    def run_with_gradients(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
        """The same with gradients, by the kernel that the long way takes for them."""
        kernel = ShortSequences() if takes_short_sequences(query, key) else CpuFlash()
        block = OneBlock(kernel, self.scale, self.is_causal, self._added(mask))
        return whole_call(block, Again(BACKENDS["tiled"], partial(self._without_vectors, mask)), query, key, value)

    def _without_vectors(self, mask: Mask | None) -> Call:
        """The call for those who have the query and the key: nothing here may hold them."""
        nothing = torch.empty(0, device="cpu")
        return self.call(nothing, nothing, ScaledDot(self.scale), mask)

    def _added(self, mask: Mask | Tensor | None) -> AdditiveMask:
        """What is added to the scores of each key: -inf beyond the length of a sequence."""
        if self.positions is None or self.numbers is None:
            return _NOTHING_ADDED
        valid = _lengths_of(mask).view(-1, 1, 1, 1)
        fewest = valid.min().item()
        tensor = torch.where(self.positions < valid, *self.numbers) if fewest < self.sizes.keys else None
        return AdditiveMask(tensor, valid[..., 0] > 0 if fewest <= 0 else None)

    def call(self, query: Tensor, key: Tensor, score: ScaledDot, mask: Mask | None) -> Call:
        """The whole call, for those who read its weights; tensors of this kind are canonical as they come."""
        bound = None if mask is None else mask.bind(self.sizes, query.device)
        return Call(
            query=query,
            key=key,
            score=score,
            normalization=Softmax(),
            mask=bound,
            bias=None,
            dropout=0.0,
            sizes=self.sizes,
        )


def call_kind(query: Any, key: Any, value: Any, score: Any, normalization: Any, mask: Any) -> CallKind | None:
    """What decides about a call without bias and dropout, if all of it can be told at once; None for others."""
    if type(score) is not ScaledDot or type(normalization) is not Softmax or not runs_as_it_stands():
        return None
    if not (type(query) is type(key) is type(value) is Tensor):
        return None
    try:
        shapes = query.shape, key.shape, value.shape
        if not (query.is_cpu and key.is_cpu and value.is_cpu) or not (len(shapes[0]) == len(shapes[1]) == 4):
            return None
        if query.stride(-1) != 1 or key.stride(-1) != 1 or value.stride(-1) != 1:
            return None
    except RuntimeError:
        return None  # nested and sparse tensors have neither: the long way says what can be done
    masked = None if mask is None else _kind_of_mask(mask)
    if masked is None and mask is not None:
        return None
    return *shapes, query.dtype, key.dtype, value.dtype, score.scale, masked


def of_projections(
    x: Any, y: Any, weight: Any, heads: Sequence[int], dim: int, score: Any, mask: Any
) -> "Settled | None":
    """What attention from x to y over the heads of one weight decides, without gradients, if its kind was seen.

    Args:
        x: (B, T, width) on the CPU.
        y: (B, S, width); x itself in self-attention.
        weight: of the projections, (heads times their width, width). One of another class has products of its own.
        heads: the numbers of query, key and value heads.
        dim: the width of each.
        score: as for `attention`, with softmax.
        mask: as for `attention`.
    """
    if type(score) is not ScaledDot or _is_grad_enabled() or not runs_as_it_stands():
        return None
    if type(x) is not Tensor or type(weight) not in PLAIN or not x.is_cpu or get_function_mode() is not None:
        return None
    try:
        if len(x.shape) != 3 or x.shape[2] != weight.shape[1] or x.dtype != weight.dtype:
            return None  # the long way says what does not fit
    except RuntimeError:
        return None  # so it does of a nested tensor, which has no shape
    (batch, length, width), (queries, keys, values), dtype = x.shape, heads, x.dtype
    others = length
    if y is not x:
        if type(y) is not Tensor or not y.is_cpu or len(y.shape) != 3:
            return None
        if y.shape[0] != batch or y.shape[2] != width:
            return None
        others = y.shape[1]
    masked = None if mask is None else _kind_of_mask(mask)
    if masked is None and mask is not None:
        return None
    shapes = (batch, queries, length, dim), (batch, keys, others, dim), (batch, values, others, dim)
    return SEEN.get((*shapes, dtype, dtype, dtype, score.scale, masked))


def runs_as_it_stands() -> bool:
    """Whether nothing changes, records or looks at what runs here."""
    if _is_compiling() or _is_autocast_enabled("cpu") or IS_CHECKING.get():
        return False
    return not count_dispatch_modes() and not is_tracing() and peek_interpreter_stack() is None and forward_level() < 0


def _kind_of_mask(mask: Any) -> CallKind | None:
    if type(mask) is Causal:
        return ("causal", mask.offset) if mask.offset is None or type(mask.offset) is int else None
    if type(mask) is Lengths:
        valid = mask.valid
        is_plain = type(valid) is Tensor and valid.is_cpu and not mask.per_query and len(valid.shape) == 1
        return ("lengths", valid.shape, valid.dtype) if is_plain and valid.is_contiguous() else None
    if type(mask) is And:
        kinds = [_kind_of_mask(one) for one in mask.masks]
        return None if None in kinds else tuple(kinds)
    return None


def _lengths_of(mask: Mask | Tensor | None) -> Tensor:
    assert isinstance(mask, Mask)
    return next(one.valid for one in mask.factors() if isinstance(one, Lengths))


def is_recorded(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether autograd records a call of these tensors."""
    return _is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)


def settle(kind: CallKind | None, call: Call, value: Tensor) -> Settled | None:
    """Keep what a call decides, if others of its kind need nothing else; None if they go the long way."""
    if kind is None or kind in SEEN:
        return None
    # Where one batch or head was spread over several, the kernel cannot take the tensors as they come.
    is_whole = kind[:3] == (call.query.shape, call.key.shape, value.shape)
    found = _settled(call, value) if is_whole else None
    if len(SEEN) >= MOST:
        SEEN.clear()
    SEEN[kind] = found
    return found


def _settled(call: Call, value: Tensor) -> Settled | None:
    scale, sizes = call.score.dot_scale(call.query.shape[-1]), call.sizes
    if scale is None or scale <= 0 or BACKENDS["fused"].why_not(call) or value.shape[-1] != call.query.shape[-1]:
        return None
    # Of no lengths there are no fewest, so that calls of no sequence go the long way.
    if not call.query.shape[0] == call.key.shape[0] == value.shape[0] == sizes.batch[0] or not sizes.batch[0]:
        return None
    # The kernel takes these whole: causality from the first key by its flag, and lengths as a bias per key.
    factors = excluding_factors(call)
    flags = [m for m in factors if causal_offset(m) == 0]
    lengths = [m for m in factors if isinstance(m, Lengths)]
    if len(flags) > 1 or len(lengths) > 1 or len(flags) + len(lengths) < len(factors):
        return None
    positions = numbers = None
    if lengths:
        positions = torch.arange(sizes.keys)
        numbers = torch.zeros((), dtype=call.query.dtype), torch.full((), -torch.inf, dtype=call.query.dtype)
    return Settled(sizes, scale, bool(flags), positions, numbers)
