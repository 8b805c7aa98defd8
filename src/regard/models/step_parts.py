"""The tensors that a compiled step of a decoder is made of, if it knows all parts of the model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.compiled.step_work import GELU, GELU_TANH, NOTHING, RELU
from regard.mechanisms.readable import is_installed
from regard.mechanisms.rotary.layouts import Half, Interleaved
from regard.mechanisms.rotary.rotary import Rotary
from regard.mechanisms.scores.base import ScaledDot
from regard.models.decoder_only import DecoderOnly
from regard.models.stack import SelfAttentionLayer
from regard.models.transformer import DecoderLayer, Transformer
from regard.nn import FeedForward, GatedFeedForward, MultiHeadAttention, PostNorm, PreNorm

MOST_BYTES = 1 << 28
"""Matrices that take more than this are read for so long that what stands between them is nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class MatrixParts:
    """a(x W^T + b)."""

    weight: Tensor
    """(out, in), in the dtype in which it is kept: float32 or bfloat16."""
    bias: Tensor | None
    activation: int = NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class NormParts:
    """A layer norm, or a norm by the root mean square."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    is_rms: bool


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParts:
    """An attention: its matrices and its heads."""

    into: MatrixParts
    out: MatrixParts
    heads: int
    groups: int
    dim: int
    scale: float
    rotary: Rotary | None
    is_across: bool
    """Whether it looks at the source; else at the positions before."""


@dataclass(frozen=True, slots=True, eq=False)
class FeedForwardParts:
    """A feed-forward network. If it is gated, its first matrix gives the gates and then what is gated."""

    up: MatrixParts
    down: MatrixParts
    is_gated: bool


@dataclass(frozen=True, slots=True, eq=False)
class SublayerParts:
    """A sublayer with its norm."""

    body: AttentionParts | FeedForwardParts
    norm: NormParts
    is_norm_first: bool

    def ends(self) -> tuple[MatrixParts, MatrixParts]:
        """Its first and its last matrix."""
        body = self.body
        return (body.into, body.out) if isinstance(body, AttentionParts) else (body.up, body.down)


@dataclass(frozen=True, slots=True, eq=False)
class StepParts:
    """All that a step needs of a decoder; the tensors are its own, and change with nothing."""

    sublayers: tuple[SublayerParts, ...]
    norm: NormParts | None
    output: MatrixParts

    def __str__(self) -> str:
        """What decides about the time of a step."""
        vocabulary, width = self.output.weight.shape
        last = self.sublayers[-1].ends()[1].weight
        kind = str(last.dtype).removeprefix("torch.")
        return f"{len(self.sublayers)} sublayers, {width} x {last.shape[1]}, {vocabulary} outputs, {kind}"


def may_be_compiled(model: Transformer | DecoderOnly, dtype: torch.dtype) -> bool:
    """Whether a compiled step knows a model whose matrices are in a dtype.

    It does not where numba is not installed. It does not know numbers other than float32, matrices other than float32
    or bfloat16, models of other parts than those of `TransformerConfig` and `DecoderOnlyConfig`, or on another device
    than the CPU, scaled rotary positions, and matrices of more than MOST_BYTES.
    """
    if not is_installed() or not _is_known(model) or dtype not in (torch.float32, torch.bfloat16):
        return False
    output = model.output.weight
    matrices = sum(one.numel() for layer in _layers(model)[0] for one in layer.parameters() if one.dim() > 1)
    return dtype.itemsize * matrices + output.itemsize * output.numel() <= MOST_BYTES


def step_parts(model: Transformer | DecoderOnly, dtype: torch.dtype) -> StepParts | None:
    """Copies of what a step of a decoder needs, its matrices in a dtype; the output layer's stays in float32.

    None for what a compiled step does not know: see `may_be_compiled`.
    """
    if not may_be_compiled(model, dtype):
        return None
    layers, last = _layers(model)
    output = model.output.weight
    return StepParts(
        tuple(_sublayer(*told, dtype) for layer in layers for told in _sublayers(layer)),
        None if type(last) is nn.Identity else _norm(last),
        _matrix(output, model.output.bias, torch.float32),
    )


def encoder_parts(model: Transformer, dtype: torch.dtype) -> StepParts | None:
    """Copies of what reading a sentence needs, its matrices in a dtype: the encoder, and as its output layer the
    projection of its vectors to the keys and values of all layers of the decoder.

    None for what compiled code does not know: see `may_be_compiled`. It does not know an encoder of rotary positions.
    """
    layers = list(model.encoder)
    if not may_be_compiled(model, dtype) or not _knows_layers(layers, model.encoder_norm):
        return None
    every = [told for layer in layers for told in _sublayers(layer)]
    across = [cast(DecoderLayer, layer).cross_attention for layer in model.decoder]
    matrices = [one for layer in layers for one in layer.parameters() if one.dim() > 1]
    matrices += [one.in_weights[0] for one in across]
    is_turned = any(isinstance(body, MultiHeadAttention) and body.rotary is not None for body, _, _ in every)
    if is_turned or dtype.itemsize * sum(one.numel() for one in matrices) > MOST_BYTES:
        return None
    weights = [one.in_weights[0][one.sizes[0] :] for one in across]
    biases = [one.in_bias[one.sizes[0] :] for one in across if one.in_bias is not None]
    last = model.encoder_norm
    return StepParts(
        tuple(_sublayer(*told, dtype) for told in every),
        None if type(last) is nn.Identity else _norm(last),
        _matrix(torch.cat(weights), torch.cat(biases) if biases else None, dtype),
    )


# -- what is known ---------------------------------------------------------------------------------


def _layers(model: Transformer | DecoderOnly) -> tuple[list[nn.Module], nn.Module]:
    """The layers of a decoder, and the norm after them."""
    if isinstance(model, DecoderOnly):
        return list(model.layers), model.final_norm
    return list(model.decoder), model.decoder_norm


def _sublayers(layer: nn.Module) -> Iterator[tuple[nn.Module, nn.Module, bool]]:
    """Each sublayer, what is around it, and whether it looks at the source."""
    one: Any = layer
    bodies = [(one.self_attention, False), (one.feed_forward, False)]
    if isinstance(layer, DecoderLayer):
        bodies.insert(1, (one.cross_attention, True))
    for (body, is_across), residual in zip(bodies, one.residuals, strict=True):
        yield body, residual, is_across


def _is_known(model: Transformer | DecoderOnly) -> bool:
    if not isinstance(model.output, nn.Linear):
        return False  # a memory has its say in each step
    weight = model.output.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    if isinstance(model, DecoderOnly) and (type(model.head) is not nn.Identity or model.relative is not None):
        return False
    return _knows_layers(*_layers(model))


def _knows_layers(layers: list[nn.Module], last: nn.Module) -> bool:
    """Whether all parts of the layers, and the norm after them, are known."""
    if type(last) is not nn.Identity and not _knows_norm(last):
        return False
    if not layers or not all(type(layer) in (SelfAttentionLayer, DecoderLayer) for layer in layers):
        return False
    every = [told for layer in layers for told in _sublayers(layer)]
    turns = {body.rotary for body, _, is_across in every if isinstance(body, MultiHeadAttention) and not is_across}
    return len(turns) == 1 and all(_knows_body(body) and _knows_residual(residual) for body, residual, _ in every)


def _knows_residual(residual: nn.Module) -> bool:
    return type(residual) in (PreNorm, PostNorm) and _knows_norm(cast(nn.Module, residual.norm))


def _knows_norm(norm: nn.Module) -> bool:
    return isinstance(norm, nn.LayerNorm | nn.RMSNorm) and len(norm.normalized_shape) == 1 and norm.weight is not None


def _knows_body(body: nn.Module) -> bool:
    if isinstance(body, MultiHeadAttention):
        is_plain = type(body) is MultiHeadAttention and type(body.score) is ScaledDot and body.is_packed
        return is_plain and (body.rotary is None or _knows_rotary(body.rotary))
    if type(body) is FeedForward:
        return _activation(body.activation) is not None
    return type(body) is GatedFeedForward and body.activation is nn.functional.silu


def _knows_rotary(rotary: Rotary) -> bool:
    """Whether the angles of a position follow from it and from plain numbers."""
    is_plain = type(rotary) is Rotary and rotary.scaling is None and isinstance(rotary.base, int | float)
    return is_plain and type(rotary.layout) in (Half, Interleaved)


def _activation(function: Callable[[Tensor], Tensor]) -> int | None:
    if function is nn.functional.relu:
        return RELU
    if function is nn.functional.gelu:
        return GELU
    is_tanh = isinstance(function, partial) and function.func is nn.functional.gelu and not function.args
    return GELU_TANH if is_tanh and cast(Any, function).keywords == {"approximate": "tanh"} else None


# -- copies ----------------------------------------------------------------------------------------


def _sublayer(body: nn.Module, residual: nn.Module, is_across: bool, dtype: torch.dtype) -> SublayerParts:
    norm, is_first = _norm(cast(nn.Module, residual.norm)), isinstance(residual, PreNorm)
    if isinstance(body, MultiHeadAttention):
        return SublayerParts(_attention(body, is_across, dtype), norm, is_first)
    if isinstance(body, GatedFeedForward):
        up, activation = body.gate_and_up, NOTHING
    else:
        assert isinstance(body, FeedForward)
        up, activation = body.up, _activation(body.activation) or NOTHING
    first = _matrix(up.weight, up.bias, dtype, activation)
    last = _matrix(body.down.weight, body.down.bias, dtype)
    return SublayerParts(FeedForwardParts(first, last, isinstance(body, GatedFeedForward)), norm, is_first)


def _attention(module: MultiHeadAttention, is_across: bool, dtype: torch.dtype) -> AttentionParts:
    """An attention. The keys and values of a source are not projected in a step."""
    rows = module.sizes[0] if is_across else sum(module.sizes)
    bias = None if module.in_bias is None else module.in_bias[:rows]
    scale = module.score.dot_scale(module.head_dim)
    assert scale is not None
    return AttentionParts(
        _matrix(module.in_weights[0][:rows], bias, dtype),
        _matrix(module.out.weight, module.out.bias, dtype),
        module.num_heads,
        module.num_kv_heads,
        module.head_dim,
        scale,
        None if is_across else module.rotary,
        is_across,
    )


def _matrix(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, activation: int = NOTHING) -> MatrixParts:
    return MatrixParts(_copy(weight, dtype), None if bias is None else _copy(bias, torch.float32), activation)


def _norm(norm: nn.Module) -> NormParts:
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    bias = _copy(norm.bias, torch.float32) if isinstance(norm, nn.LayerNorm) and norm.bias is not None else None
    # torch's own default of a norm by the root mean square.
    eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
    return NormParts(_copy(norm.weight, torch.float32), bias, eps, isinstance(norm, nn.RMSNorm))


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype, copy=True).contiguous()
