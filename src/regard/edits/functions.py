"""How each function of attention runs edited: its arguments become a call, and the edits change its weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.backends.base import Call
from regard.edits.base import Edit
from regard.edits.call_place import CallPlace
from regard.edits.edited_weights import EditedCall, EditedWeights
from regard.errors import ArgumentError
from regard.functional import Attended, attention, make_call
from regard.inspection.capture.evidence import Evidence
from regard.inspection.capture.factors import output_error
from regard.inspection.capture.folded_heads import Folding
from regard.inspection.capture.kernel_lse import KernelLse
from regard.inspection.capture.module_stack import FunctionObserver, Thread
from regard.inspection.capture.multi_head_calls import arguments_by_name, observe_function, projected_call
from regard.inspection.capture.observed_call import CallVectors, ObservedCall, Reading
from regard.inspection.capture.regard_calls import Own, observe_attention
from regard.inspection.capture.retention import Keeper
from regard.inspection.capture.sdpa_calls import laid_out_by_heads, masked, observe_sdpa, one_rank
from regard.inspection.capture.snapshot import copied
from regard.mechanisms.biases.base import DenseBias
from regard.mechanisms.guards import is_autocasting
from regard.mechanisms.masks.basic import causal
from regard.mechanisms.normalizations import Softmax
from regard.mechanisms.scores.base import ScaledDot
from regard.mechanisms.shapes import as_autocast, without_autocast
from regard.torch_private import peek_interpreter_stack

Vectors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What a run with edits wants of one call."""

    edits: tuple[Edit, ...]
    keeper: Keeper
    """It reads the masks of the model, each once."""
    placed: Callable[[Call, Tensor, bool, str], CallPlace]
    """Where a call stands, from the call, the keys as the model gave them, whether these are known to be of another
    sequence, and why heads are not known (empty if they are)."""
    ran: Callable[[CallPlace, EditedCall | None], None]
    """Called with what came of the call; with None if the edits changed nothing."""


@dataclass(slots=True, eq=False)
class Edited(ObservedCall):
    """One edited call, after it ran."""

    made: EditedCall
    call: Call
    vectors: Vectors
    how: str
    is_editable: ClassVar[bool] = True

    def read(self, keeper: Keeper, name: str) -> Reading:
        """Keep what the weights are read from, which the edits are part of."""
        own = Own(Attended(self.made.output, self.made.softmax), self.vectors)
        notes = [f"edited, {self.made.plan}"]
        if self.made.weights is self.made.softmax:
            return replace(own.read(keeper, name), notes=notes)
        weights, softmax = (
            one.source.mapped(lambda t: copied(t.detach())) for one in (self.made.weights, self.made.softmax)
        )
        evidence = Evidence(self.call.query, self.call.key, self.vectors[1])
        return Reading(None, notes, self._error, stored=weights, softmax=softmax, evidence=evidence)

    def query_key_value(self) -> CallVectors:
        """The vectors of the model."""
        return CallVectors(*self.vectors)

    def _error(self) -> float:
        weights, value = self.made.weights.detach(), self.vectors[2].detach()
        value = value.repeat_interleave(self.call.group, dim=-3) if self.call.group > 1 else value
        return output_error(weights @ value.to(weights.dtype), self.made.output.detach(), value)


class _CallEdits:
    """The edits of one call, from the outermost `with` inwards."""

    def __init__(self, thread: Thread) -> None:
        self._thread = thread
        found = [editor.wants(thread) for editor in thread.editors]
        self.wanted = [one for one in found if isinstance(one, Wanted)]
        self._changing: list[tuple[Wanted, CallPlace]] = []

    @property
    def keeper(self) -> Keeper:
        """That of the outermost."""
        return self.wanted[0].keeper

    def of(self, call: Call, key: Tensor, *, crosses: bool = False, unknown: str = "") -> EditedWeights | None:
        """What the edits make of the weights of a call; None if they change nothing."""
        if peek_interpreter_stack() is not None:
            raise ArgumentError(
                "attention cannot be edited inside torch.func transforms (vmap, grad), where a call has no numbers "
                "that could be looked at: use torch.autograd, and a dimension of the batch"
            )
        weights = EditedWeights(call)
        for one in self.wanted:
            at, before = one.placed(call, key, crosses, unknown), weights
            for edit in one.edits:
                weights = edit.apply(weights, at)
            if weights is before:
                one.ran(at, None)
            else:
                self._changing.append((one, at))
        return weights if self._changing else None

    def run(
        self, weights: EditedWeights, values: Tensor, vectors: Vectors, how: str, backend: str | None = None
    ) -> EditedCall:
        """Run the edited call, and hand it to the watches."""
        with without_autocast(vectors[0]):
            made = weights.run(values, vectors[2], backend)
        for one, at in self._changing:
            one.ran(at, made)
        self._thread.give(Edited(made, weights.call, vectors, f"{how}, edited"))
        return made


def _unedited(
    thread: Thread, observe: FunctionObserver, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a call as it is; it is observed only if somebody watches."""
    if len(thread.editors) == len(thread.watches):
        thread.taken += 1
        return func(*args, **kwargs)
    return observe(thread, func, args, kwargs)


def edit_sdpa(thread: Thread, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run F.scaled_dot_product_attention edited."""
    edits = _CallEdits(thread)
    if not edits.wanted:
        return _unedited(thread, observe_sdpa, func, args, kwargs)
    given = laid_out_by_heads(thread, args, kwargs, None, KernelLse())
    query, key, value = as_autocast(given.query, given.key, given.value)
    value = one_rank(query, value, given.enable_gqa)[1]
    query, key = one_rank(query, key, given.enable_gqa)
    key, value = _of_one_grouping(key, value)
    call, values = make_call(
        query, key, value, score=ScaledDot(given.scale), normalization=Softmax(), mask=None, bias=None,
        dropout=given.dropout_p,
    )  # fmt: skip
    unknown = given.folding if isinstance(given.folding, str) else ""
    call = _under_mask(call, given.attn_mask, edits.keeper, is_causal=given.is_causal)
    weights = edits.of(call, given.key, unknown=unknown)
    if weights is None:
        return _unedited(thread, observe_sdpa, func, args, kwargs)
    output = edits.run(weights, values, (query, key, value), given.how).output
    if isinstance(given.folding, Folding):
        output = given.folding.folded(output)
    # The layout of the model: its heads may be the rows of the key head that they share.
    shape = (*(args[0] if args else kwargs["query"]).shape[:-1], output.shape[-1])
    return output.reshape(shape) if output.numel() == _count(shape) else output


def _of_one_grouping(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with the same heads: transformers repeats both under a mask, and `key` has that undone."""
    if key.dim() < 4 or key.shape[-3] == value.shape[-3] or value.shape[-3] % key.shape[-3]:
        return key, value
    group = value.shape[-3] // key.shape[-3]
    grouped = value.unflatten(-3, (-1, group))
    if torch.equal(grouped, grouped[..., :1, :, :].expand_as(grouped)):
        return key, grouped[..., 0, :, :]
    return key.repeat_interleave(group, dim=-3), value


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def _under_mask(call: Call, mask: Tensor | None, keeper: Keeper, *, is_causal: bool) -> Call:
    """The call under the model's own mask."""
    also, sizes = causal(0) if is_causal else None, call.sizes
    if mask is None:
        return call if also is None else replace(call, mask=also.bind(sizes, call.query.device))
    if mask.requires_grad:
        # Numbers that are learned, such as those of T5, must not be read as a mask, which would lose their gradient.
        wide = mask[(None,) * (len(sizes.map_shape) - mask.dim())]
        return _with_bias(call, wide, is_causal=is_causal)
    kind = call.query.device.type
    dtype = torch.get_autocast_dtype(kind) if is_autocasting(kind) and call.query.dtype != torch.float64 else None
    return masked(call, keeper.mask(mask, sizes, dtype=dtype), also)


def _with_bias(call: Call, bias: Tensor, *, is_causal: bool) -> Call:
    device = call.query.device
    mask = causal(0).bind(call.sizes, device) if is_causal else None
    return replace(call, mask=mask, bias=DenseBias(bias).bind(call.sizes, device))


def edit_multi_head(thread: Thread, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run F.multi_head_attention_forward edited: projections, attention, and the projection of the output."""
    edits = _CallEdits(thread)
    if not edits.wanted:
        return _unedited(thread, observe_function, func, args, kwargs)
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
        dtype = torch.get_autocast_dtype(kind) if is_autocasting(kind) else None
        call = masked(call, layer.mask(edits.keeper, sizes, dtype), causal(0) if layer.is_causal else None)
    weights = edits.of(call, key, crosses=given["key"] is not given["query"])
    if weights is None:
        return _unedited(thread, observe_function, func, args, kwargs)
    if not sizes.batch:
        query, key, value = (t.squeeze(0) for t in (query, key, value))
    made = edits.run(weights, values, (query, key, value), layer.how)
    output = made.output.reshape(sizes.flat_batch, *made.output.shape[-3:]).transpose(1, 2).flatten(2)
    output = F.linear(output, *layer.out).transpose(0, 1)
    output = output if sizes.batch else output.squeeze(1)
    if not given["need_weights"]:
        return output, None
    dense = made.weights.dense().to(output.dtype)
    return output, dense.mean(-3) if given["average_attn_weights"] else dense


def edit_attention(thread: Thread, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `regard.attention` edited."""
    edits = _CallEdits(thread)
    if not edits.wanted:
        return _unedited(thread, observe_attention, func, args, kwargs)
    settings = {**arguments_by_name(attention, args, kwargs)}
    query, key, value = as_autocast(*(settings.pop(name) for name in ("query", "key", "value")))
    backend, keeps_values = settings.pop("backend"), settings.pop("keep_values")
    returns_weights = settings.pop("return_weights")
    call, values = make_call(query, key, value, **settings)
    weights = edits.of(call, key)
    if weights is None:
        return _unedited(thread, observe_attention, func, args, kwargs)
    made = edits.run(weights, values, (query, key, value), "regard.attention", backend)
    if not returns_weights:
        return made.output
    return Attended(made.output, made.weights.with_values(value) if keeps_values else made.weights)


EDITABLE: Mapping[object, FunctionObserver] = {
    F.scaled_dot_product_attention: edit_sdpa,
    torch.ops.aten.scaled_dot_product_attention: edit_sdpa,
    torch.ops.aten.scaled_dot_product_attention.default: edit_sdpa,
    F.multi_head_attention_forward: edit_multi_head,
    attention: edit_attention,
}
"""The functions that can be edited."""
