"""Observe nn.MultiheadAttention and the layers made of it: queries and keys come from the layer's input and weights.

torch runs these layers fused if it can; an entire encoder layer may be one operator without visible queries and keys.
They stay fused: a watch saves the input and the weights, and the projections are deferred to the first read of the map.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.call.masks.base import And, Mask
from regard.call.masks.basic import causal
from regard.call.masks.basic import lengths as lengths_mask
from regard.call.normalizations import Softmax
from regard.call.scores.base import ScaledDot
from regard.call.shapes import Sizes, as_autocast
from regard.errors import OverwrittenError, ShapeError
from regard.kernels.base import Call
from regard.maps.sources.factors import Factors
from regard.maps.sources.values import widened
from regard.tensors.fresh import Fresh
from regard.tensors.guards import autocast_of
from regard.tensors.torch_private import attends_as_torch, nested_sizes
from regard.tensors.undisturbed import undisturbed, with_graph
from regard.watching.kept.evidence import Evidence
from regard.watching.kept.mask_reading import GivenMask, both, masked
from regard.watching.kept.rebuilding import Rebuilding
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.kept.saved_values import OutputOf, ValuesOf, saved_values
from regard.watching.origins.streams import Origins
from regard.watching.readers.attention_calls import AttentionCall
from regard.watching.readers.functions import Args, Func, Kwargs
from regard.watching.readers.kernel_lse import KernelLse, of_memory
from regard.watching.readers.projections import (
    EncoderLayerRest,
    FusedRebuilding,
    Layer,
    LayerNormArguments,
    ProjectedHeads,
    Projection,
    layer_of_call,
    layer_of_module,
    run_with_heads,
)
from regard.watching.running.module_kinds import FUSED_SUBCLASS, may_run_fused, ran_fused
from regard.watching.running.observed_call import CallVectors, Observation, ObservedCall
from regard.watching.running.thread_state import RunningModule, ThreadState


@dataclass(slots=True, kw_only=True, eq=False)
class MultiHeadCall(AttentionCall):
    """One call of multi-head attention whose heads were seen, (N, H, T, D) or without N."""

    is_editable: ClassVar[bool] = True
    layer: "Projected"
    scale: float | None

    @classmethod
    def of(cls, layer: "Projected", heads: ProjectedHeads) -> "MultiHeadCall":
        is_batched, vectors = layer.query.input.dim() == 3, (heads.query, heads.key, heads.value)
        query, key, value = (one if is_batched else one.squeeze(0) for one in vectors)
        return cls(
            query=query, key=key, value=value, output=heads.output, kernel=heads.kernel,
            is_causal=heads.is_causal, scale=heads.scale, layer=layer, dropped=layer.dropped, origins=layer.origins,
            how=layer.how,
        )  # fmt: skip

    def call_of(self, query: Tensor, key: Tensor) -> Call:
        return _call_of(query, key, self.layer.sizes(), self.scale)

    def mask_of(self, sizes: Sizes, policy: RetentionPolicy) -> tuple[GivenMask, Mask | None]:
        dtype = autocast_of(self.query.device.type)
        return self.layer.mask(policy, sizes, dtype), causal(0) if self.is_causal else None

    def computed(self) -> tuple[Tensor, Tensor]:
        query, key = self.query, self.key
        return (query, key) if query.dim() == 4 else (query.unsqueeze(0), key.unsqueeze(0))

    def evidence(self, call: Call, fresh: Fresh | None) -> Evidence | None:
        return self.layer.evidence()


@dataclass(slots=True, kw_only=True, eq=False)
class Projected(ObservedCall):
    """One call of multi-head attention, by its inputs and weights: the heads are projected when the map is read."""

    is_editable: ClassVar[bool] = True
    query: Projection
    key: Projection
    value: Projection
    out: tuple[Tensor, Tensor | None]
    num_heads: int
    batch_first: bool
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    is_causal: bool
    dropped: float
    output: Tensor | None
    rest: EncoderLayerRest | None = None
    """The steps after the attention, in an encoder layer that ran as one operator."""
    lengths: Tensor | None = None
    """The true lengths (N,) if the input was nested (it is padded here)."""
    origins: Origins | None = None
    how: str

    def read(self, policy: RetentionPolicy, name: str) -> Observation:
        sizes, dtype = self.sizes(), autocast_of(self.query.input.device.type)
        given = self.mask(policy, sizes, dtype)
        factors = self._factors(policy, name, sizes, given, dtype)
        beside = saved_values(
            policy, name, sizes, lambda: self._values(policy, name, dtype), lambda: self._output(policy, name, dtype)
        )
        rebuilding = self._rebuilding(factors, given)
        return Observation(factors, rebuilding=rebuilding, evidence=self.evidence(), beside=beside)

    def _factors(
        self, policy: RetentionPolicy, name: str, sizes: Sizes, given: GivenMask, dtype: torch.dtype | None
    ) -> Factors:
        sources = Fresh()
        query = self.query.keep(policy, name, sources)
        key = self.key.keep(policy, name, sources, (self.query, query))

        num_heads, batch_first = self.num_heads, self.batch_first
        beside = causal(0) if self.is_causal else None

        def build() -> Call:
            # The map may be read under another autocast than the call's.
            with nullcontext() if dtype is None else autocast_to(dtype, query.input):
                heads = query.heads(num_heads, batch_first=batch_first), key.heads(num_heads, batch_first=batch_first)
            return masked(_call_of(*heads, sizes, None), given, beside)

        within = with_graph if policy.graph else undisturbed
        return Factors(
            build, None, sizes=sizes, fresh=given.fresh, sources=sources, even=given.even, within=within
        )  # fmt: skip

    def _values(self, policy: RetentionPolicy, name: str, dtype: torch.dtype | None) -> ValuesOf:
        fresh = Fresh()
        value = self.value.keep(policy, name, fresh)
        heads, batch_first, graph = self.num_heads, self.batch_first, policy.graph

        def make() -> Tensor:
            with with_graph() if graph else undisturbed(), autocast_to(dtype, value.input):
                return value.heads(heads, batch_first=batch_first)

        return ValuesOf(make, fresh)

    def _output(self, policy: RetentionPolicy, name: str, dtype: torch.dtype | None) -> OutputOf:
        fresh = Fresh()
        kept = policy.keep_weight(self.out[0], f"weights of {name}", fresh)
        heads, batch_first = self.num_heads, self.batch_first

        def laid_out(gradient: Tensor) -> Tensor:
            weight = kept.detach()
            weight = widened(weight if dtype is None else weight.to(dtype))
            gradient = widened(gradient if gradient.dim() == 3 else gradient.unsqueeze(1))
            gradient = gradient if batch_first else gradient.transpose(0, 1)
            return (gradient @ weight).unflatten(-1, (heads, -1)).transpose(1, 2)

        return OutputOf(self.output, laid_out, self.dropped, fresh)

    def projected(self) -> MultiHeadCall:
        projections = (self.query, self.key, self.value)
        query, key, value = as_autocast(
            *(p.heads(self.num_heads, batch_first=self.batch_first) for p in projections)
        )  # fmt: skip
        return MultiHeadCall.of(self, ProjectedHeads(query, key, value, None, self.is_causal, None, KernelLse()))

    def query_key_value(self) -> CallVectors:
        return self.projected().query_key_value()

    def evidence(self) -> Evidence | None:
        """The inputs of the query and key projections; None if keys are appended to the projected ones."""
        if self.key.is_extended:
            return None
        return Evidence(self._by_sequence(self.query.input), self._by_sequence(self.key.input), self.key.input)

    def sizes(self) -> Sizes:
        x, y = self.query.input, self.key.input
        is_batched = x.dim() == 3
        length, batch = (1, 0) if self.batch_first else (0, 1)
        if not is_batched:
            length = 0
        keys = y.shape[length] if self.key.static is None else self.key.static.shape[1]
        keys += (self.key.row is not None) + self.key.zero
        lead = (x.shape[batch],) if is_batched else ()
        if not x.shape[length] or not keys:
            raise ShapeError(f"lengths must be at least 1, got {x.shape[length]} queries and {keys} keys")
        return Sizes(lead, self.num_heads, self.num_heads, x.shape[length], keys, has_heads=True)

    def mask(self, policy: RetentionPolicy, sizes: Sizes, dtype: torch.dtype | None) -> GivenMask:
        if self.lengths is not None:
            return self._nested(sizes)
        extra = (self.key.row is not None) + self.key.zero
        tensors = []
        if self.attn_mask is not None and not self.is_causal:
            mask = of_memory(self.attn_mask)
            shape = (*sizes.leading, *mask.shape[-2:])
            tensors.append(mask.view(shape) if mask.dim() == 3 else mask)
        if self.key_padding_mask is not None:
            tensors.append(of_memory(self.key_padding_mask).view(*sizes.batch, 1, 1, -1))
        tensors = [F.pad(t, (0, extra)) if extra else t for t in tensors]
        given = [policy.mask(t, sizes, drops=True, dtype=dtype) for t in tensors]
        if len(given) < 2:
            return given[0] if given else GivenMask()
        return both(*given) or policy.mask(_added(tensors[0]) + _added(tensors[1]), sizes, dtype=dtype)

    def _nested(self, sizes: Sizes) -> GivenMask:
        assert self.lengths is not None
        rows = torch.arange(sizes.queries, device=self.lengths.device) < self.lengths[:, None]
        # A row beyond its sequence does not exist in a nested tensor: it has no key.
        mask = lengths_mask(self.lengths[:, None] * rows, per_query=True)
        return GivenMask(mask=mask.bind(sizes, self.lengths.device))

    def _rebuilding(self, factors: Factors, given: GivenMask) -> Rebuilding | str:
        if self.dropped:
            return "dropout"
        given_output = self.output if self.rest is None else self.rest.output
        assert given_output is not None, "a call that ran has an output"
        projections = (self.query, self.key, self.value)
        if True in [p.is_extended for p in projections]:
            return "its queries and keys were not seen"
        also = causal(0).bind(factors.sizes, given_output.device) if self.is_causal else None
        masks = [m for m in (given.mask, also) if m is not None]
        mask = And(tuple(masks)) if masks else None
        x = [replace(p, input=self._by_sequence(p.normed())) for p in projections]
        return FusedRebuilding(
            projections=(x[0], x[1], x[2]), num_heads=self.num_heads, out=self.out,
            output=self._by_sequence(given_output), sizes=factors.sizes, mask=mask, given=given, factors=factors,
            rest=self.rest, lengths=self.lengths,
        )  # fmt: skip

    def _by_sequence(self, x: Tensor) -> Tensor:
        """An input or output as (N, L, E)."""
        x = x.detach() if x.dim() == 3 else x.detach().unsqueeze(1)
        return x if self.batch_first else x.transpose(0, 1)


def _call_of(query: Tensor, key: Tensor, sizes: Sizes, scale: float | None) -> Call:
    # Projected heads are canonical, and torch has checked them.
    return Call(
        query=query, key=key, score=ScaledDot(scale), normalization=Softmax(), mask=None, bias=None, dropout=0.0,
        sizes=sizes,
    )  # fmt: skip


def autocast_to(dtype: torch.dtype | None, like: Tensor) -> AbstractContextManager[Any]:
    """The autocast during a call, on the device of a tensor; for None that of a read, which has none."""
    return nullcontext() if dtype is None else torch.autocast(like.device.type, dtype)


def _added(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)


def _projected(
    layer: Layer, given: Mapping[str, Any], output: Tensor | None, *, batch_first: bool = False, how: str
) -> Projected:
    projections = [
        Projection(
            input=given[name], weight=layer.weights[n], bias=layer.biases, part=n, is_packed=layer.is_packed,
            row=layer.rows[n], zero=layer.has_zero_row and n > 0, static=layer.static[n],
        )
        for n, name in enumerate(("query", "key", "value"))
    ]  # fmt: skip
    return Projected(
        query=projections[0],
        key=projections[1],
        value=projections[2],
        out=layer.out,
        num_heads=layer.num_heads,
        batch_first=batch_first,
        key_padding_mask=given["key_padding_mask"],
        attn_mask=given["attn_mask"],
        is_causal=given["is_causal"] and given["key_padding_mask"] is None and not given["need_weights"],
        dropped=layer.dropout,
        output=output,
        how=how,
    )


def _of_module(module: nn.MultiheadAttention, given: Mapping[str, Any], output: Tensor | None) -> Projected:
    lengths, query = None, given["query"]
    if query.is_nested:
        lengths = nested_sizes(query)[:, 0].to(query.device)
        query = query.to_padded_tensor(0.0)
        given = {**given, "query": query, "key": query, "value": query}
        output = None if output is None else output.to_padded_tensor(0.0)
    batch_first = module.batch_first and query.dim() == 3
    layer = layer_of_module(module)
    if {weight.device for weight in layer.weights if weight is not None} != {query.device}:
        raise OverwrittenError(
            "the weights of the layer left its device before they could be read, as an offload hook moves them: watch "
            "it in train() mode or with gradients, where torch does not run it fused"
        )
    called = _projected(layer, given, output, batch_first=batch_first, how="nn.MultiheadAttention")
    is_causal = called.is_causal and not ran_fused(module, given)
    return replace(called, lengths=lengths, is_causal=is_causal)


def _of_encoder_layer(layer: nn.TransformerEncoderLayer, given: Mapping[str, Any], output: Tensor) -> Projected:
    """A call of an encoder layer that ran fused; its kernel drops a key wherever a mask is not 0."""
    mask, padding = given["src_mask"], given["src_key_padding_mask"]
    inside = {
        **dict.fromkeys(("query", "key", "value"), given["src"]), "attn_mask": None if mask is None else mask != 0,
        "key_padding_mask": None if padding is None else padding != 0, "is_causal": False, "need_weights": False,
    }  # fmt: skip
    called = _of_module(layer.self_attn, inside, None)
    first = layer.norm1
    norm = LayerNormArguments(first.normalized_shape, first.weight, first.bias, first.eps) if layer.norm_first else None
    query, key = replace(called.query, norm=norm), replace(called.key, norm=norm)
    value = replace(called.value, norm=norm)
    padded = output.to_padded_tensor(0.0) if output.is_nested else output
    rest = EncoderLayerRest(layer, called.query.input, padded)
    return replace(called, query=query, key=key, value=value, rest=rest, how="nn.TransformerEncoderLayer, fused")


@cache
def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in signature(function).parameters.items()}


def arguments_by_name(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> dict[str, Any]:
    # `Signature.bind` does the same and checks the call, but takes 15 us, a tenth of a watched call; this takes 1 us.
    parameters = _parameters(function)
    return {**parameters, **dict(zip(parameters, args, strict=False)), **kwargs}


def observe_function(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
    given = arguments_by_name(func, args, kwargs)
    output, heads = run_with_heads(func, args, kwargs, given)
    thread.try_to(_give, thread, given, output[0], heads)
    return output


def _give(thread: ThreadState, given: Mapping[str, Any], output: Tensor, heads: ProjectedHeads | None) -> None:
    called = projected_call(thread, given, output)
    thread.give(called if heads is None else MultiHeadCall.of(called, heads))
    thread.streams.follow(output, given["query"])


def projected_call(thread: ThreadState, given: Mapping[str, Any], output: Tensor | None) -> Projected:
    module = thread.stack[-1].module if thread.stack else None
    is_module = isinstance(module, nn.MultiheadAttention)
    how = "nn.MultiheadAttention" if is_module else "F.multi_head_attention_forward"
    origins = thread.streams.origins_of_inputs(given["query"], given["key"])
    return replace(_projected(layer_of_call(given), given, output, how=how), origins=origins)


def observe_module(
    thread: ThreadState, frame: RunningModule, module: nn.Module, args: Args, kwargs: Kwargs, output: Any
) -> None:
    """Hand a call of nn.MultiheadAttention to the watches if it ran fused, because then no function was seen."""
    if thread.taken == frame.taken:
        assert isinstance(module, nn.MultiheadAttention)
        given = arguments_by_name(nn.MultiheadAttention.forward, (module, *args), kwargs)
        origins = thread.streams.origins_of_inputs(given["query"], given["key"])
        thread.give(replace(_of_module(module, given, output[0]), origins=origins))
        thread.streams.follow(output[0], given["query"])


def observe_encoder_layer(
    thread: ThreadState, frame: RunningModule, module: nn.Module, args: Args, kwargs: Kwargs, output: Any
) -> None:
    if thread.taken != frame.taken:
        return
    assert isinstance(module, nn.TransformerEncoderLayer)
    # A layer that is not fused calls its `self_attn`, whose call was observed unless the layer was changed.
    if attends_as_torch(module) and type(module.self_attn).forward is nn.MultiheadAttention.forward:
        given = arguments_by_name(nn.TransformerEncoderLayer.forward, (module, *args), kwargs)
        origins = thread.streams.origins_of_inputs(given["src"], given["src"])
        thread.give(replace(_of_encoder_layer(module, given, output), origins=origins), module.self_attn)
        thread.streams.follow(output, given["src"])
    elif may_run_fused(module):
        thread.unread(FUSED_SUBCLASS)
