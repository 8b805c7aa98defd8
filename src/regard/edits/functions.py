"""How each function of attention runs edited: its arguments become a call, and the edits change its weights."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.call.shapes import as_autocast, take, without_autocast
from regard.edits.base import CallPlace, Edit
from regard.edits.edited_weights import EditedCall, EditedWeights
from regard.errors import ArgumentError
from regard.functional import Attended, attention, make_call
from regard.kernels.base import BackendName, Call
from regard.maps.attention_map import AttentionMap
from regard.tensors.fresh import copied
from regard.tensors.guards import is_transformed
from regard.watching.kept.evidence import Evidence
from regard.watching.kept.rebuilding import Rebuilding, Rebuilt
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.origins.streams import Origins
from regard.watching.readers.attention_calls import AttentionCall
from regard.watching.readers.functions import Args, Func, Kwargs
from regard.watching.readers.kernel_lse import KernelLse
from regard.watching.readers.multi_head_calls import arguments_by_name, observe_function, projected_call
from regard.watching.readers.sdpa_calls import RegardCall, laid_out_by_heads, observe_attention, observe_sdpa
from regard.watching.readers.traced_calls import FunctionObserver
from regard.watching.running.module_kinds import would_run_fused
from regard.watching.running.observed_call import CallVectors, Observation, ObservedCall
from regard.watching.running.thread_state import ThreadState


@dataclass(frozen=True, slots=True, eq=False)
class CallEdits:
    edits: tuple[Edit, ...]
    policy: RetentionPolicy
    placed: Callable[[Call, Tensor, bool | None, str], CallPlace]
    """The place of a call, from the call, its keys as the model gave them, a flag for keys of another sequence, and the
    reason for unknown heads (empty otherwise)."""
    tried: Callable[[int, CallPlace], None]
    ran: Callable[[CallPlace, EditedCall | None], None]
    """Called with the result of the call, or None if the edits changed nothing."""


@dataclass(slots=True, eq=False)
class Edited(ObservedCall, Rebuilding):
    made: EditedCall
    call: Call
    of: AttentionCall
    how: str
    origins: Origins | None = None
    is_editable: ClassVar[bool] = True

    def read(self, policy: RetentionPolicy, name: str) -> Observation:
        own = RegardCall.of(Attended(self.made.output, self.made.softmax), *self.of.vectors)
        notes = [f"edited, {self.made.plan}"]
        if self.made.weights is self.made.softmax:
            return replace(own.read(policy, name), notes=notes)
        weights, softmax = (
            one.source.mapped(lambda t: copied(t.detach())) for one in (self.made.weights, self.made.softmax)
        )
        evidence = Evidence(self.call.query, self.call.key, self.of.key)
        return Observation(None, notes, self, stored=weights, softmax=softmax, evidence=evidence)

    def query_key_value(self) -> CallVectors:
        return self.of.query_key_value()

    @property
    def queries(self) -> int:
        return self.call.sizes.queries

    def some(self, rows: range) -> Rebuilt:
        weights = self.made.weights.detach()
        return self._rebuilt(weights.block(rows, range(weights.shape[-1])), rows)

    def whole(self) -> Rebuilt:
        return self._rebuilt(self.made.weights.detach(), range(self.queries))

    def _rebuilt(self, weights: Tensor | AttentionMap, rows: range) -> Rebuilt:
        value, group = self.of.value.detach(), self.call.group
        value = value.repeat_interleave(group, dim=-3) if group > 1 else value
        return Rebuilt(weights @ value.to(weights.dtype), take(self.made.output.detach(), rows), value)


Prepared = tuple[AttentionCall, Callable[[EditedCall], Any], BackendName | None]
"""The call of a function's arguments; what the function returns, of an edited call; and the backend to run it on."""


def _intercepted(
    prepare: Callable[[ThreadState, Func, Args, Kwargs], Prepared], observe: FunctionObserver
) -> FunctionObserver:
    def run(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
        wanted = [one for one in thread.before() if isinstance(one, CallEdits)]
        if wanted:
            if is_transformed():
                raise ArgumentError(
                    "attention cannot be edited inside torch.func transforms (vmap, grad), where a call has no numbers "
                    "that could be looked at: use torch.autograd, and a dimension of the batch"
                )
            of, returned, backend = prepare(thread, func, args, kwargs)
            call, _ = of.under_masks(of.call_of(*of.computed()), wanted[0].policy)
            weights, changing = _edited_weights(of, replace(call, dropout=of.dropped), wanted)
            if changing:
                with without_autocast(of.query.device):
                    made = weights.run(of.value_layout(call.sizes)(of.value).to(call.query.dtype), backend)
                for one, at in changing:
                    one.ran(at, made)
                thread.give(Edited(made, weights.call, of, f"{of.how}, edited", of.origins))
                result = returned(made)
                thread.streams.follow(result[0] if isinstance(result, tuple) else result, *args[:1])
                return result
        if len(thread.editors) < len(thread.watches):
            return observe(thread, func, args, kwargs)
        thread.taken += 1
        return func(*args, **kwargs)

    return run


Changing = list[tuple[CallEdits, CallPlace]]


def _edited_weights(of: AttentionCall, call: Call, wanted: list[CallEdits]) -> tuple[EditedWeights, Changing]:
    weights, changing, names = EditedWeights(call), Changing(), of.heads.dimensions
    crosses = None if of.origins is None else of.origins.crosses
    for one in wanted:
        at, before = one.placed(call, of.key, crosses, "" if names is None else names.why), weights
        for number, edit in enumerate(one.edits):
            at.missing.clear()
            weights = edit.apply(weights, at)
            one.tried(number, at)
        if weights is before:
            one.ran(at, None)
        else:
            changing.append((one, at))
    return weights, changing


def _prepared_sdpa(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Prepared:
    given = laid_out_by_heads(thread, args, kwargs, None, KernelLse())

    def output(made: EditedCall) -> Tensor:
        layout = given.heads.layout
        whole = made.output if layout is None else layout.folded(made.output)
        # The layout of the model: its heads may be the rows of the key head they share.
        shape = (*(args[0] if args else kwargs["query"]).shape[:-1], whole.shape[-1])
        return whole.reshape(shape) if whole.numel() == math.prod(shape) else whole

    return given, output, None


def _prepared_multi_head(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Prepared:
    given = arguments_by_name(func, args, kwargs)
    layer = projected_call(thread, given, None)
    sizes = layer.sizes()

    def output(made: EditedCall) -> tuple[Tensor, Tensor | None]:
        rows = made.output.reshape(sizes.flat_batch, *made.output.shape[-3:]).transpose(1, 2).flatten(2)
        rows = F.linear(rows, *layer.out).transpose(0, 1)
        rows = rows if sizes.batch else rows.squeeze(1)
        if not given["need_weights"]:
            return rows, None
        dense = made.weights.dense().to(rows.dtype)
        return rows, dense.mean(-3) if given["average_attn_weights"] else dense

    return layer.projected(), output, None


def _prepared_attention(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Prepared:
    settings = {**arguments_by_name(attention, args, kwargs)}
    query, key, value = as_autocast(*(settings.pop(name) for name in ("query", "key", "value")))
    backend, keeps_values = settings.pop("backend"), settings.pop("keep_values")
    returns_weights = settings.pop("return_weights")
    call, _ = make_call(query, key, value, **settings)

    def output(made: EditedCall) -> Tensor | Attended:
        if not returns_weights:
            return made.output
        return Attended(made.output, made.weights.with_values(value) if keeps_values else made.weights)

    made = RegardCall(
        query=query, key=key, value=value, output=None, made=call, known_state=None, dropped=call.dropout,
        origins=thread.streams.origins(query, key),
    )  # fmt: skip
    return made, output, backend


_edit_sdpa = _intercepted(_prepared_sdpa, observe_sdpa)
_edit_unfused = _intercepted(_prepared_multi_head, observe_function)


def _edit_multi_head(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
    if kwargs.get("is_causal") and would_run_fused():
        kwargs = {**kwargs, "is_causal": False}
    return _edit_unfused(thread, func, args, kwargs)


EDITABLE: Mapping[object, FunctionObserver] = {
    F.scaled_dot_product_attention: _edit_sdpa,
    torch.ops.aten.scaled_dot_product_attention: _edit_sdpa,
    torch.ops.aten.scaled_dot_product_attention.default: _edit_sdpa,
    F.multi_head_attention_forward: _edit_multi_head,
    attention: _intercepted(_prepared_attention, observe_attention),
}
