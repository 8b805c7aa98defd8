"""Observe F.scaled_dot_product_attention: the arguments of the model, and the log-sum-exp of the kernel."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.call.masks.base import Mask
from regard.call.masks.basic import causal
from regard.call.normalizations import Softmax
from regard.call.scores.base import ScaledDot
from regard.call.shapes import Sizes
from regard.errors import ShapeError
from regard.functional import Attended, attention, make_call
from regard.kernels.base import Call
from regard.maps.sources.call import source_of_call
from regard.maps.sources.factors import Factors
from regard.tensors.fresh import Fresh
from regard.tensors.guards import autocast_of
from regard.watching.kept.mask_reading import GivenMask
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.readers.attention_calls import NOTHING_GIVEN, AttentionCall
from regard.watching.readers.functions import Args, Func, Kwargs
from regard.watching.readers.heads import AS_DOCUMENTED, OVER_DEPTH, documented_heads, folded_heads, inferred_heads
from regard.watching.readers.kernel_lse import KernelLse, decided, run_with_lse, sdpa_arguments
from regard.watching.running.thread_state import ThreadState


@dataclass(slots=True, kw_only=True, eq=False)
class Sdpa(AttentionCall):
    is_editable: ClassVar[bool] = True
    attn_mask: Tensor | None
    scale: float | None
    enable_gqa: bool
    autocast: torch.dtype | None
    """The dtype to which autocast turns its tensors; None for none."""
    how: str = "F.scaled_dot_product_attention"

    def computed(self) -> tuple[Tensor, Tensor]:
        query, key, dtype, seen = self.query, self.key, self.autocast, (self.kernel.query, self.kernel.key)
        if dtype is not None:
            query, key = (
                s if s is not None and s.shape == g.shape and s.dtype == dtype and not g.requires_grad else g.to(dtype)
                for s, g in zip(seen, (query, key), strict=True)
            )
        return one_rank(query, key, self.value, self.enable_gqa)

    def call_of(self, query: Tensor, key: Tensor) -> Call:
        # Its checks are cached by shape.
        known = _known_of(query, key, self.scale) if self.autocast is None else None
        return _checked(query, key, self.scale) if known is None else replace(known, query=query, key=key)

    def mask_of(self, sizes: Sizes, policy: RetentionPolicy) -> tuple[GivenMask, Mask | None]:
        mask, is_causal = self.attn_mask, self.is_causal
        if is_causal and mask is not None and mask.is_floating_point():
            # The keys hidden by the lowest element depend on the other keys of the row, some of them invisible here.
            later = torch.ones(sizes.queries, sizes.keys, dtype=torch.bool, device=mask.device).triu(1)
            mask, is_causal = mask.masked_fill(later, -torch.inf), False
        given = NOTHING_GIVEN if mask is None else policy.mask(mask, sizes, dtype=self.autocast)
        return given, causal(0) if is_causal else None


def _known_of(query: Tensor, key: Tensor, scale: float | None) -> Call | None:
    """A cached call of such queries and keys without their data; None if they cannot be cached."""
    is_plain = type(query) is type(key) is Tensor and query.dim() == key.dim() == 4 and len(query) == len(key)
    if not is_plain or not (scale is None or type(scale) is float):
        return None
    return _known(query.shape, key.shape, query.dtype, key.dtype, query.device, key.device, scale)


@lru_cache(maxsize=64)
def _known(
    queries: torch.Size, keys: torch.Size, query_dtype: torch.dtype, key_dtype: torch.dtype,
    query_device: torch.device, key_device: torch.device, scale: float | None,
) -> Call:  # fmt: skip
    query, key = (
        torch.empty((), dtype=dtype, device=device).expand(shape)
        for shape, dtype, device in ((queries, query_dtype, query_device), (keys, key_dtype, key_device))
    )
    return _checked(query, key, scale)


def _checked(query: Tensor, key: Tensor, scale: float | None) -> Call:
    score = ScaledDot(scale)
    return make_call(query, key, key, score=score, normalization=Softmax(), mask=None, bias=None, dropout=0.0)[0]


def one_rank(query: Tensor, key: Tensor, value: Tensor, has_groups: bool) -> tuple[Tensor, Tensor]:
    """Query and key, broadcast to one rank, with the heads of values at least. Raises ShapeError if nested."""
    if query.is_nested or key.is_nested:
        raise ShapeError("nested tensors are not read: pass padded tensors with a mask to see this call")
    rank = max(query.dim(), key.dim(), value.dim(), 4 if has_groups else 2)
    if not query.dim() == key.dim() == rank:
        query, key = (t[(None,) * (rank - t.dim())] for t in (query, key))
    if has_groups and value.shape[-3] > key.shape[-3]:
        key = key.repeat_interleave(value.shape[-3] // key.shape[-3], -3)
    elif not has_groups and not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        key = key.expand(*torch.broadcast_shapes(key.shape[:-2], value.shape[:-2]), *key.shape[-2:])
        query = query.expand(*torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), *query.shape[-2:])
    return query, key


def observe_sdpa(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
    output, kernel = run_with_lse(func, args, kwargs)
    thread.try_to(lambda: thread.give(laid_out_by_heads(thread, args, kwargs, output, kernel)))
    return output


def laid_out_by_heads(
    thread: ThreadState, args: Args, kwargs: Kwargs, output: Tensor | None, kernel: KernelLse
) -> Sdpa:
    """A call of F.scaled_dot_product_attention with a dimension of heads, if the model gave it another layout. `output`
    is None before it ran."""
    given = decided(sdpa_arguments(*args, **kwargs))
    query: Tensor = given["query"]
    dtype = None if query.dtype == torch.float64 else autocast_of(query.device.type)
    call = Sdpa(dropped=given.pop("dropout_p"), **given, output=output, kernel=kernel, autocast=dtype)
    call.origins = thread.streams.origins(call.query, call.key)
    over_depth = call.origins is not None and call.origins.keys.sort == "layers"
    if output is not None:
        # (Attention over depth mixes no positions: its outputs have those of the states that it attends to.)
        thread.streams.follow(output, call.key if over_depth else call.query)
    if over_depth:
        return replace(call, heads=OVER_DEPTH)
    return _by_heads(thread, _with_heads(call, thread.stack[-1].module)) if thread.stack else call


def _by_heads(thread: ThreadState, call: Sdpa) -> Sdpa:
    """Lay a call out by its heads: folded into the batch, (B * H, T, D), or before windows, (B, H, windows, T, D)."""
    rows = (call.query, call.key, call.value)
    rank = rows[0].dim()
    if any(t.is_nested or t.dim() != rank for t in rows) or rank < 3:
        return call
    if rank > 3:
        heads = documented_heads(thread, rows[::-1])
    else:
        heads = folded_heads(call.value) if len({len(t) for t in rows}) == 1 else AS_DOCUMENTED
    if (layout := heads.layout) is None:
        return call if heads.dimensions is None else replace(call, heads=heads)
    query, key, value = (layout.unfolded(t) for t in rows)
    mask = call.attn_mask
    if mask is not None and rank > 3:
        mask = layout.unfolded(mask[(None,) * (rank - mask.dim())])
    elif mask is not None and mask.dim() == 3:
        mask = layout.unfolded(mask) if len(mask) > 1 else mask.unsqueeze(0)
    # The kernel's row state has the order of the folded rows.
    return replace(call, query=query, key=key, value=value, attn_mask=mask, kernel=KernelLse(), heads=heads)


def _with_heads(call: Sdpa, module: nn.Module) -> Sdpa:
    """The heads of a single query as the rows of their shared key head: transformers 5.23, `pack_gqa`."""
    # A missing attribute of a module costs three table lookups.
    name = "num_key_value_groups"
    group = getattr(module, name, 1) if name in module.__dict__ or hasattr(type(module), name) else 1
    query, mask = call.query, call.attn_mask
    if group == 1 or call.enable_gqa or query.dim() != 4:
        return call
    inferred = inferred_heads(module)
    if query.shape[1] == call.key.shape[1] and query.shape[1] in inferred:
        return _not_repeated(call, group)
    if query.shape[1:3] != (call.key.shape[1], group) or query.shape[1] * group not in inferred:
        return call
    if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
        mask = mask.flatten(1, 2).unsqueeze(2)
    return replace(call, query=query.flatten(1, 2).unsqueeze(2), attn_mask=mask, enable_gqa=True)


def _not_repeated(call: Sdpa, group: int) -> Sdpa:
    if call.value.shape[1] != call.key.shape[1]:
        return call
    grouped = [one.unflatten(1, (-1, group)) for one in (call.key, call.value)]
    if not all(torch.equal(one, one[:, :, :1].expand_as(one)) for one in grouped):
        return call
    return replace(call, key=grouped[0][:, :, 0], value=grouped[1][:, :, 0], enable_gqa=True)


@dataclass(slots=True, kw_only=True, eq=False)
class RegardCall(AttentionCall):
    is_editable: ClassVar[bool] = True
    made: Call
    """Its call, with the graph of the model,"""
    known_state: Tensor | None
    """and its row state. An unknown one costs a pass over the scores, to be paid only when the map is read."""
    how: str = "regard.attention"

    @classmethod
    def of(cls, attended: Attended, query: Tensor, key: Tensor, value: Tensor) -> "RegardCall":
        source = source_of_call(attended.weights.source, "a watch")
        return cls(
            query=query, key=key, value=value, output=attended.output, made=(call := source.call),
            known_state=source.factors.known_state_of(call), dropped=call.dropout,
        )  # fmt: skip

    def computed(self) -> tuple[Tensor, Tensor]:
        return self.made.query, self.made.key

    def call_of(self, query: Tensor, key: Tensor) -> Call:
        return replace(self.made, query=query, key=key)

    def under_masks(self, call: Call, policy: RetentionPolicy) -> tuple[Call, GivenMask]:
        return call if policy.graph else Factors.given(call, None).mapped(Tensor.detach).form, NOTHING_GIVEN

    def state(self, call: Call, given: GivenMask, policy: RetentionPolicy, fresh: Fresh) -> Tensor | None:
        return None if self.known_state is None else policy.keep(self.known_state, "log-sum-exp", fresh)


def observe_attention(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
    # A call that also returns the weights runs in the same kernel and gives the same bits.
    attended = attention(*args, **{**kwargs, "return_weights": True})
    # (The first three can be given by name only where a model does not call it so.)
    call = RegardCall.of(attended, *args[:3])
    call.origins = thread.streams.origins(*args[:2])
    thread.give(call)
    thread.streams.follow(attended.output, args[0])
    return attended if kwargs.get("return_weights") else attended.output
