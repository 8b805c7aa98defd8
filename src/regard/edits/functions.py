"""How each function of attention runs edited: its arguments become a call, and the edits change its weights."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.call.biases.base import DenseBias
from regard.call.masks.basic import causal
from regard.call.normalizations import Softmax
from regard.call.scores.base import ScaledDot
from regard.call.shapes import as_autocast, take, without_autocast
from regard.edits.base import Edit
from regard.edits.call_place import CallPlace
from regard.edits.edited_weights import EditedCall, EditedWeights
from regard.errors import ArgumentError
from regard.functional import Attended, attention, make_call
from regard.kernels.base import BackendName, Call
from regard.maps.attention_map import AttentionMap
from regard.tensors.guards import autocast_of, is_transformed
from regard.watching.kept.evidence import Evidence
from regard.watching.kept.factors import masked
from regard.watching.kept.rebuilding import Rebuilding, Rebuilt
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.kept.saved_tensor import copied
from regard.watching.origins.provenance import Origins
from regard.watching.readers.functions import Args, Func, Kwargs
from regard.watching.readers.kernel_lse import KernelLse
from regard.watching.readers.multi_head_calls import arguments_by_name, observe_function, projected_call
from regard.watching.readers.regard_calls import RegardCall, observe_attention
from regard.watching.readers.sdpa_calls import laid_out_by_heads, observe_sdpa, one_rank
from regard.watching.readers.traced_calls import FunctionObserver
from regard.watching.running.module_kinds import would_run_fused
from regard.watching.running.observed_call import CallVectors, ObservedCall, Reading
from regard.watching.running.thread_state import ThreadState

Vectors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class CallEdits:
    """The edits of one run for one call."""

    edits: tuple[Edit, ...]
    policy: RetentionPolicy
    """It reads the masks of the model, each once."""
    placed: Callable[[Call, Tensor, bool | None, str], CallPlace]
    """The place of a call, from the call, its keys as the model gave them, a flag for keys of another sequence, and the
    reason for unknown heads (empty otherwise)."""
    tried: Callable[[int, CallPlace], None]
    """Called with the number of an edit, and the place of a call with positions of its choice."""
    ran: Callable[[CallPlace, EditedCall | None], None]
    """Called with the result of the call, or None if the edits changed nothing."""


@dataclass(slots=True, eq=False)
class Edited(ObservedCall):
    """One edited call, after it ran."""

    made: EditedCall
    call: Call
    vectors: Vectors
    how: str
    origins: Origins | None = None
    is_editable: ClassVar[bool] = True

    def read(self, policy: RetentionPolicy, name: str) -> Reading:
        own = RegardCall(Attended(self.made.output, self.made.softmax), self.vectors)
        notes = [f"edited, {self.made.plan}"]
        if self.made.weights is self.made.softmax:
            return replace(own.read(policy, name), notes=notes)
        weights, softmax = (
            one.source.mapped(lambda t: copied(t.detach())) for one in (self.made.weights, self.made.softmax)
        )
        evidence = Evidence(self.call.query, self.call.key, self.vectors[1])
        return Reading(None, notes, EditedRebuilding(self), stored=weights, softmax=softmax, evidence=evidence)

    def query_key_value(self) -> CallVectors:
        return CallVectors(*self.vectors)


@dataclass(frozen=True, slots=True, eq=False)
class EditedRebuilding(Rebuilding):
    """The output of an edited call."""

    edited: Edited

    @property
    def queries(self) -> int:
        return self.edited.call.sizes.queries

    def some(self, rows: range) -> Rebuilt:
        weights = self.edited.made.weights.detach()
        return self._rebuilt(weights.block(rows, range(weights.shape[-1])), rows)

    def whole(self) -> Rebuilt:
        return self._rebuilt(self.edited.made.weights.detach(), range(self.queries))

    def _rebuilt(self, weights: Tensor | AttentionMap, rows: range) -> Rebuilt:
        value, group = self.edited.vectors[2].detach(), self.edited.call.group
        value = value.repeat_interleave(group, dim=-3) if group > 1 else value
        return Rebuilt(weights @ value.to(weights.dtype), take(self.edited.made.output.detach(), rows), value)


@dataclass(frozen=True, slots=True, eq=False)
class ReadyCall:
    """A call of a function, ready to run with other weights."""

    call: Call
    values: Tensor
    vectors: Vectors
    """Queries, keys and values with their heads, as the watches get them."""
    how: str
    output: Callable[[EditedCall], Any]
    """Turns an edited call into the function's return value."""
    key: Tensor
    origins: Origins | None = None
    """The sequences of queries and keys; None if unknown."""
    heads_unknown: str = ""
    """Why heads and batch rows are not separable; empty if they are."""
    backend: BackendName | None = None


ArgumentReader = Callable[[ThreadState, Func, Args, Kwargs, RetentionPolicy], ReadyCall]
"""Reads the arguments of a function: (thread, function, args, kwargs, policy) -> the call."""


def _intercepted(prepare: ArgumentReader, observe: FunctionObserver) -> FunctionObserver:
    """The interceptor of a function: runs the call with edited weights, or unchanged without an edit."""

    def run(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
        wanted = [one for one in thread.before() if isinstance(one, CallEdits)]
        if wanted:
            ready = prepare(thread, func, args, kwargs, wanted[0].policy)
            weights, changing = _edited_weights(ready, wanted)
            if changing:
                result = ready.output(_run(thread, ready, weights, changing))
                thread.traces.follow(result[0] if isinstance(result, tuple) else result, *args[:1])
                return result
        if len(thread.editors) < len(thread.watches):
            return observe(thread, func, args, kwargs)
        thread.taken += 1
        return func(*args, **kwargs)

    return run


Changing = list[tuple[CallEdits, CallPlace]]


def _edited_weights(ready: ReadyCall, wanted: list[CallEdits]) -> tuple[EditedWeights, Changing]:
    """The edited weights, and the runs that change them, from the outermost `with` inwards."""
    if is_transformed():
        raise ArgumentError(
            "attention cannot be edited inside torch.func transforms (vmap, grad), where a call has no numbers "
            "that could be looked at: use torch.autograd, and a dimension of the batch"
        )
    weights, changing = EditedWeights(ready.call), Changing()
    for one in wanted:
        crosses = None if ready.origins is None else ready.origins.crosses
        at, before = one.placed(ready.call, ready.key, crosses, ready.heads_unknown), weights
        for number, edit in enumerate(one.edits):
            at.missing.clear()
            weights = edit.apply(weights, at)
            one.tried(number, at)
        if weights is before:
            one.ran(at, None)
        else:
            changing.append((one, at))
    return weights, changing


def _run(thread: ThreadState, ready: ReadyCall, weights: EditedWeights, changing: Changing) -> EditedCall:
    """Run the edited call, and notify the watches."""
    with without_autocast(ready.vectors[0].device):
        made = weights.run(ready.values, ready.vectors[2], ready.backend)
    for one, at in changing:
        one.ran(at, made)
    thread.give(Edited(made, weights.call, ready.vectors, f"{ready.how}, edited", ready.origins))
    return made


def _ready_sdpa(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, policy: RetentionPolicy) -> ReadyCall:
    given = laid_out_by_heads(thread, args, kwargs, None, KernelLse())
    query, key, value = as_autocast(given.query, given.key, given.value)
    value = one_rank(query, value, given.enable_gqa)[1]
    query, key = one_rank(query, key, given.enable_gqa)
    key, value = _of_one_grouping(key, value)
    call, values = make_call(
        query, key, value, score=ScaledDot(given.scale), normalization=Softmax(), mask=None, bias=None,
        dropout=given.dropout_p,
    )  # fmt: skip
    call = _under_mask(call, given.attn_mask, policy, is_causal=given.is_causal)

    def output(made: EditedCall) -> Tensor:
        layout = given.heads.layout
        whole = made.output if layout is None else layout.folded(made.output)
        # The layout of the model: its heads may be the rows of the key head they share.
        shape = (*(args[0] if args else kwargs["query"]).shape[:-1], whole.shape[-1])
        return whole.reshape(shape) if whole.numel() == math.prod(shape) else whole

    names = given.heads.dimensions
    unknown = names.why if names is not None else ""
    return ReadyCall(
        call, values, (query, key, value), given.how, output, given.key, given.origins, heads_unknown=unknown
    )  # fmt: skip


def _of_one_grouping(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with equal heads: transformers repeats both under a mask, and `key` has that undone."""
    if key.dim() < 4 or key.shape[-3] == value.shape[-3] or value.shape[-3] % key.shape[-3]:
        return key, value
    group = value.shape[-3] // key.shape[-3]
    grouped = value.unflatten(-3, (-1, group))
    if torch.equal(grouped, grouped[..., :1, :, :].expand_as(grouped)):
        return key, grouped[..., 0, :, :]
    return key.repeat_interleave(group, dim=-3), value


def _under_mask(call: Call, mask: Tensor | None, policy: RetentionPolicy, *, is_causal: bool) -> Call:
    also, sizes = causal(0) if is_causal else None, call.sizes
    if mask is None:
        return call if also is None else replace(call, mask=also.bind(sizes, call.query.device))
    if mask.requires_grad:
        # A learned bias, such as T5's, would lose its gradient if read as a mask.
        wide = mask[(None,) * (len(sizes.map_shape) - mask.dim())]
        return _with_bias(call, wide, is_causal=is_causal)
    kind = call.query.device.type
    dtype = autocast_of(kind) if call.query.dtype != torch.float64 else None
    return masked(call, policy.mask(mask, sizes, dtype=dtype), also)


def _with_bias(call: Call, bias: Tensor, *, is_causal: bool) -> Call:
    device = call.query.device
    mask = causal(0).bind(call.sizes, device) if is_causal else None
    return replace(call, mask=mask, bias=DenseBias(bias).bind(call.sizes, device))


def _ready_multi_head(
    thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, policy: RetentionPolicy
) -> ReadyCall:
    given = arguments_by_name(func, args, kwargs)
    layer = projected_call(thread, given, None)
    projections = (layer.query, layer.key, layer.value)
    query, key, value = as_autocast(*(part.heads(layer.num_heads, batch_first=False) for part in projections))
    call, values = make_call(
        query, key, value, score=ScaledDot(), normalization=Softmax(), mask=None, bias=None, dropout=layer.dropout
    )  # fmt: skip
    sizes = layer.sizes()
    call = replace(call, sizes=sizes)
    learned = layer.learned_bias(sizes)
    if learned is not None:
        call = _with_bias(call, learned, is_causal=False)
    else:
        kind = query.device.type
        dtype = autocast_of(kind)
        call = masked(call, layer.mask(policy, sizes, dtype), causal(0) if layer.is_causal else None)

    def output(made: EditedCall) -> tuple[Tensor, Tensor | None]:
        rows = made.output.reshape(sizes.flat_batch, *made.output.shape[-3:]).transpose(1, 2).flatten(2)
        rows = F.linear(rows, *layer.out).transpose(0, 1)
        rows = rows if sizes.batch else rows.squeeze(1)
        if not given["need_weights"]:
            return rows, None
        dense = made.weights.dense().to(rows.dtype)
        return rows, dense.mean(-3) if given["average_attn_weights"] else dense

    vectors = (query, key, value) if sizes.batch else (query.squeeze(0), key.squeeze(0), value.squeeze(0))
    return ReadyCall(call, values, vectors, layer.how, output, key, layer.origins)


def _ready_attention(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, policy: RetentionPolicy) -> ReadyCall:
    settings = {**arguments_by_name(attention, args, kwargs)}
    query, key, value = as_autocast(*(settings.pop(name) for name in ("query", "key", "value")))
    backend, keeps_values = settings.pop("backend"), settings.pop("keep_values")
    returns_weights = settings.pop("return_weights")
    call, values = make_call(query, key, value, **settings)

    def output(made: EditedCall) -> Tensor | Attended:
        if not returns_weights:
            return made.output
        return Attended(made.output, made.weights.with_values(value) if keeps_values else made.weights)

    return ReadyCall(
        call,
        values,
        (query, key, value),
        "regard.attention",
        output,
        key,
        thread.traces.origins(query, key),
        backend=backend,
    )


_edit_sdpa = _intercepted(_ready_sdpa, observe_sdpa)
_edit_unfused = _intercepted(_ready_multi_head, observe_function)


def _edit_multi_head(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run the call unfused, with the mask that the fused layer would take."""
    if kwargs.get("is_causal") and would_run_fused():
        kwargs = {**kwargs, "is_causal": False}
    return _edit_unfused(thread, func, args, kwargs)


EDITABLE: Mapping[object, FunctionObserver] = {
    F.scaled_dot_product_attention: _edit_sdpa,
    torch.ops.aten.scaled_dot_product_attention: _edit_sdpa,
    torch.ops.aten.scaled_dot_product_attention.default: _edit_sdpa,
    F.multi_head_attention_forward: _edit_multi_head,
    attention: _intercepted(_ready_attention, observe_attention),
}
