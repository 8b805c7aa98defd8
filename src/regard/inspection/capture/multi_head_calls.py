"""nn.MultiheadAttention and the layers made of it: queries and keys from the layer's input and weights.

torch runs these fused where it can, down to a whole encoder layer in one operator that carries no
queries and no keys. They stay fused: what is kept is the input and the weights, and the projections
are made when the map is first read.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.backends.base import Call
from regard.functional import make_call
from regard.inspection.capture.factors import Factors, output_error, weighted
from regard.inspection.capture.mask_reading import GivenMask, both
from regard.inspection.capture.module_stack import FUSED_SUBCLASS, HANDLERS, MODULES, Frame, Thread, may_run_fused
from regard.inspection.capture.observed_call import Reading, Source
from regard.inspection.capture.retention import Keeper
from regard.inspection.capture.sdpa_calls import masked
from regard.inspection.capture.snapshot import Kept
from regard.mechanisms.masks.basic import causal
from regard.mechanisms.masks.basic import lengths as lengths_mask
from regard.mechanisms.normalizations import Softmax
from regard.mechanisms.scores.base import ScaledDot
from regard.mechanisms.shapes import Sizes


class LayerNormArguments(NamedTuple):
    """A layer norm as F.layer_norm takes it."""

    shape: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """How one of query, key and value is made: a linear map of an input, cut into heads, and what is appended."""

    input: Tensor
    weight: Tensor | None
    """None where the projection is static."""
    bias: Tensor | None
    part: int
    """Which third of packed weights and biases is meant."""
    is_packed: bool
    norm: "Norm | None" = None
    """What the input goes through first."""
    row: Tensor | None = None
    """A learned row (1, 1, E) behind the input's."""
    zero: bool = False
    """Whether a row of zeros comes last."""
    static: Tensor | None = None
    """(N * H, S, D) in place of all this."""

    def keep(self, keeper: Keeper, what: str, beside: "Pair | None" = None) -> "tuple[Projection, list[Kept]]":
        """The same from kept tensors; an input that another projection has as well is kept once."""
        held: list[Kept] = []

        def weight(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            held.append(keeper.keep_weight(tensor, f"the weights of {what}"))
            return held[-1].tensor

        def activation(tensor: Tensor, name: str) -> Tensor:
            held.append(keeper.keep(tensor, f"the {name} of {what}"))
            return held[-1].tensor

        shared = beside is not None and beside[0].input is self.input
        x = beside[1].input if beside is not None and shared else activation(self.input, "input")
        kept = replace(
            self, input=x, weight=weight(self.weight), bias=weight(self.bias), row=weight(self.row),
            static=None if self.static is None else activation(self.static, "keys"),
            norm=None if self.norm is None else self.norm._replace(
                weight=weight(self.norm.weight), bias=weight(self.norm.bias)
            ),
        )  # fmt: skip
        return kept, held

    def heads(self, num_heads: int, *, batch_first: bool) -> Tensor:
        """(N, H, L, D), computed now."""
        if self.static is not None:
            return self.static.unflatten(0, (-1, num_heads))
        x = self.input if self.input.dim() == 3 else self.input.unsqueeze(1)
        if self.norm is not None:
            x = F.layer_norm(x, *self.norm)
        assert self.weight is not None
        weight = self.weight.chunk(3)[self.part] if self.is_packed else self.weight
        bias = None if self.bias is None else self.bias.chunk(3)[self.part]
        x = F.linear(x, weight, bias)
        x = x if batch_first else x.transpose(0, 1)
        if self.row is not None:
            x = torch.cat([x, self.row.to(x.dtype).expand(x.shape[0], 1, -1)], dim=1)
        if self.zero:
            x = torch.cat([x, x.new_zeros(x.shape[0], 1, x.shape[2])], dim=1)
        return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


KeptProjection = tuple[Projection, Projection]
"""A projection as the model has it, and as it is kept."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projected(Source):
    """One call of multi-head attention, after it ran."""

    query: Projection
    key: Projection
    value: Projection
    out: tuple[Tensor, Tensor | None]
    num_heads: int
    batch_first: bool
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    is_causal: bool
    """Whether the causal flag was all that the kernel got."""
    dropout: float
    output: Tensor | None
    lengths: Tensor | None = None
    """The true lengths (N,) of a nested input, which was padded."""
    how: str

    def read(self, keeper: Keeper, name: str) -> Reading:
        """Inputs, weights and masks; the rest when the map is read."""
        query, held = self.query.keep(keeper, name)
        key, more = self.key.keep(keeper, name, (self.query, query))
        sizes = self._sizes()
        kind = self.query.input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        given = self._mask(keeper, sizes, dtype)
        kind = query.input.device.type

        def build() -> Call:
            with torch.autocast(kind, dtype, enabled=dtype is not None):
                q, k = (p.heads(self.num_heads, batch_first=self.batch_first) for p in (query, key))
            call, _ = make_call(
                q, k, k, score=ScaledDot(), normalization=Softmax(), mask=None, bias=None, dropout=0.0
            )  # fmt: skip
            return masked(replace(call, sizes=sizes), given, causal(0) if self.is_causal else None)

        factors = Factors(sizes, build, held=(*held, *more, *given.kept))
        return Reading(factors, verify=self._verify(factors))

    def _sizes(self) -> Sizes:
        x, y = self.query.input, self.key.input
        is_batched = x.dim() == 3
        length, batch = (1, 0) if self.batch_first else (0, 1)
        if not is_batched:
            length = 0
        keys = y.shape[length] if self.key.static is None else self.key.static.shape[1]
        keys += (self.key.row is not None) + self.key.zero
        lead = (x.shape[batch],) if is_batched else ()
        return Sizes(lead, self.num_heads, self.num_heads, x.shape[length], keys, has_heads=True)

    def _mask(self, keeper: Keeper, sizes: Sizes, dtype: torch.dtype | None) -> GivenMask:
        if self.lengths is not None:
            return self._nested(sizes)
        extra = (self.key.row is not None) + self.key.zero
        tensors = []
        if self.attn_mask is not None and not self.is_causal:
            mask = self.attn_mask
            shape = (*sizes.leading, *mask.shape[-2:])
            tensors.append(mask.view(shape) if mask.dim() == 3 else mask)
        if self.key_padding_mask is not None:
            tensors.append(self.key_padding_mask.view(*sizes.batch, 1, 1, -1))
        tensors = [F.pad(t, (0, extra)) if extra else t for t in tensors]
        given = [keeper.mask(t, sizes, drops=True, dtype=dtype) for t in tensors]
        if len(given) < 2:
            return given[0] if given else GivenMask()
        return both(*given) or keeper.mask(_added(tensors[0]) + _added(tensors[1]), sizes, dtype=dtype)

    def _nested(self, sizes: Sizes) -> GivenMask:
        assert self.lengths is not None
        rows = torch.arange(sizes.queries, device=self.lengths.device) < self.lengths[:, None]
        # A row beyond its sequence does not exist in a nested tensor: it has no key.
        mask = lengths_mask(self.lengths[:, None] * rows, per_query=True)
        return GivenMask(mask=mask.bind(sizes, self.lengths.device))

    def _verify(self, factors: Factors) -> Callable[[], float] | str:
        if self.dropout:
            return "dropout"
        if self.output is None:
            return "the fused layer gives no output of its attention"
        output = self.output if self.output.dim() == 3 else self.output.unsqueeze(1)
        wanted = output if self.batch_first else output.transpose(0, 1)

        def error() -> float:
            value = self.value.heads(self.num_heads, batch_first=self.batch_first)
            heads = weighted(factors.call, factors.state, value).transpose(1, 2).flatten(2)
            return output_error(F.linear(heads.to(self.out[0].dtype), *self.out), wanted, value)

        return error


def _added(mask: Tensor) -> Tensor:
    """A mask whose True drops, as numbers to add."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)


def _of_function(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    output: Tensor | None,
    batch_first: bool = False,
    how: str,
) -> Projected:
    """A call from the arguments of F.multi_head_attention_forward, whose names and order these are."""
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else (in_proj_weight,) * 3
    rows, statics = (None, bias_k, bias_v), (None, static_k, static_v)
    projections = [
        Projection(
            input=x, weight=weights[n], bias=in_proj_bias, part=n, is_packed=not use_separate_proj_weight,
            row=rows[n], zero=add_zero_attn and n > 0, static=statics[n],
        )
        for n, x in enumerate((query, key, value))
    ]  # fmt: skip
    return Projected(
        query=projections[0],
        key=projections[1],
        value=projections[2],
        out=(out_proj_weight, out_proj_bias),
        num_heads=num_heads,
        batch_first=batch_first,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        is_causal=is_causal and key_padding_mask is None and not need_weights,
        dropout=dropout_p if training else 0.0,
        output=output,
        how=how,
    )


def _of_module(
    module: nn.MultiheadAttention,
    output: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Projected:
    """A call from the arguments of nn.MultiheadAttention's forward."""
    separate = not module._qkv_same_embed_dim
    lengths = None
    if query.is_nested:
        lengths = query._nested_tensor_size()[:, 0].to(query.device)
        query = key = value = query.to_padded_tensor(0.0)
        output = None
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight") if separate else ()
    projected = _of_function(
        query, key, value, module.embed_dim, module.num_heads, module.in_proj_weight, module.in_proj_bias,
        module.bias_k, module.bias_v, module.add_zero_attn, module.dropout, module.out_proj.weight,
        module.out_proj.bias, module.training, key_padding_mask, need_weights, attn_mask,
        use_separate_proj_weight=separate, **{name: getattr(module, name) for name in names}, is_causal=is_causal,
        output=output, batch_first=module.batch_first and query.dim() == 3, how="nn.MultiheadAttention",
    )  # fmt: skip
    return replace(projected, lengths=lengths)


def _of_layer(
    layer: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Projected:
    """A call from the arguments of an encoder layer that ran fused, whose kernel drops wherever a mask is not 0."""
    masks = [None if mask is None else mask != 0 for mask in (src_mask, src_key_padding_mask)]
    projected = _of_module(
        layer.self_attn, None, src, src, src, key_padding_mask=masks[1], attn_mask=masks[0], need_weights=False
    )
    first = layer.norm1
    norm = LayerNormArguments(first.normalized_shape, first.weight, first.bias, first.eps) if layer.norm_first else None
    query = replace(projected.query, norm=norm)
    return replace(
        projected,
        query=query,
        key=replace(projected.key, norm=norm),
        how="nn.TransformerEncoderLayer, fused",
    )


def _function(thread: Thread, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    output = func(*args, **kwargs)
    thread.try_to(_give, thread, args, kwargs, output[0])
    return output


def _give(thread: Thread, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
    is_module = bool(thread.stack) and isinstance(thread.stack[-1].module, nn.MultiheadAttention)
    how = "nn.MultiheadAttention" if is_module else "F.multi_head_attention_forward"
    thread.give(_of_function(*args, **kwargs, output=output, how=how))


def _module(
    thread: Thread, frame: Frame, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    if thread.taken == frame.taken:
        thread.give(_of_module(module, output[0], *args, **kwargs))  # type: ignore[arg-type]


def _layer(
    thread: Thread, frame: Frame, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    if thread.taken != frame.taken:
        return
    assert isinstance(module, nn.TransformerEncoderLayer)
    # Unfused, a layer calls its `self_attn`, which then was observed, unless somebody has changed it.
    is_torchs = type(module)._sa_block is nn.TransformerEncoderLayer._sa_block
    if is_torchs and type(module.self_attn).forward is nn.MultiheadAttention.forward:
        thread.give(_of_layer(module, *args, **kwargs), module.self_attn)
    elif may_run_fused(module):
        thread.unread(frame, FUSED_SUBCLASS)


HANDLERS[F.multi_head_attention_forward] = _function
MODULES[nn.MultiheadAttention.forward] = _module
MODULES[nn.TransformerEncoderLayer.forward] = _layer
# It decides by the same question as its layers whether to pack a padded batch.
MODULES[nn.TransformerEncoder.forward] = lambda *_: None
