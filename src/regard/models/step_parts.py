"""The tensors of a decoder that its compiled step is made of, if it knows them all."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.models.transformer import DecoderLayer, Transformer
from regard.nn import FeedForward, MultiHeadAttention, PreNorm

MOST_BYTES = 1 << 28
"""Matrices that take more than this are read for so long that what stands between them is nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class MatrixParts:
    """x W^T + b."""

    weight: Tensor
    """(out, in), in the dtype in which it is kept: float32 or bfloat16."""
    bias: Tensor | None
    is_relu: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class NormParts:
    """The numbers of a layer norm."""

    weight: Tensor
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParts:
    """An attention of one layer: its matrices and its heads."""

    into: MatrixParts
    out: MatrixParts
    heads: int
    groups: int
    dim: int
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """A layer of the decoder, each sublayer with its norm."""

    back: AttentionParts
    across: AttentionParts
    up: MatrixParts
    down: MatrixParts
    norms: tuple[NormParts, NormParts, NormParts]
    is_norm_first: bool


@dataclass(frozen=True, slots=True, eq=False)
class StepParts:
    """All that a step needs of a decoder; the tensors are its own, and change with nothing."""

    layers: tuple[LayerParts, ...]
    norm: NormParts | None
    output: MatrixParts

    def __str__(self) -> str:
        """What decides about the time of a step."""
        vocabulary, width = self.output.weight.shape
        up = self.layers[0].up.weight
        kind = str(up.dtype).removeprefix("torch.")
        return f"{len(self.layers)} layers, {width} x {up.shape[0]}, {vocabulary} outputs, {kind}"


def step_parts(model: Transformer, dtype: torch.dtype) -> StepParts | None:
    """Copies of what a step of a decoder needs, its matrices in a dtype.

    None where numba is not installed, and for what a compiled step does not know: numbers other than float32, matrices
    other than float32 or bfloat16, norms other than layer norms, activations other than ReLU, rotary positions, and
    matrices of more than MOST_BYTES.
    """
    if find_spec("numba") is None or not _is_known(model) or dtype not in (torch.float32, torch.bfloat16):
        return None
    output = model.output.weight
    matrices = sum(one.numel() for one in model.decoder.parameters() if one.dim() > 1)
    if dtype.itemsize * matrices + output.itemsize * output.numel() > MOST_BYTES:
        return None
    last = model.decoder_norm
    return StepParts(
        tuple(_layer(cast(DecoderLayer, layer), dtype) for layer in model.decoder),
        _norm(last) if isinstance(last, nn.LayerNorm) else None,
        _affine(output, model.output.bias, torch.float32),
    )


def _is_known(model: Transformer) -> bool:
    if model.output.weight.dtype != torch.float32 or type(model.decoder_norm) not in (nn.LayerNorm, nn.Identity):
        return False
    for one in model.decoder:
        layer = cast(DecoderLayer, one)
        norms = [type(cast(Any, residual).norm) for residual in layer.residuals]
        if norms != [nn.LayerNorm] * 3 or type(layer.feed_forward) is not FeedForward:
            return False
        if layer.feed_forward.activation is not nn.functional.relu or layer.self_attention.rotary is not None:
            return False
    return len(model.decoder) > 0


def _layer(layer: DecoderLayer, dtype: torch.dtype) -> LayerParts:
    back, across, residuals = layer.self_attention, layer.cross_attention, [cast(Any, one) for one in layer.residuals]
    feed_forward = cast(FeedForward, layer.feed_forward)
    first, second, third = (_norm(residual.norm) for residual in residuals)
    return LayerParts(
        _attention(back, 3, dtype),
        _attention(across, 1, dtype),
        _affine(feed_forward.up.weight, feed_forward.up.bias, dtype, is_relu=True),
        _affine(feed_forward.down.weight, feed_forward.down.bias, dtype),
        (first, second, third),
        isinstance(residuals[0], PreNorm),
    )


def _attention(module: MultiHeadAttention, parts: int, dtype: torch.dtype) -> AttentionParts:
    """An attention, with the projections of its first parts: the query's, or the query's, the key's and the value's."""
    rows = sum(module.sizes[:parts])
    bias = None if module.in_bias is None else module.in_bias[:rows]
    scale = module.score.dot_scale(module.head_dim)
    assert scale is not None
    return AttentionParts(
        _affine(module.in_weights[0][:rows], bias, dtype),
        _affine(module.out.weight, module.out.bias, dtype),
        module.num_heads,
        module.num_kv_heads,
        module.head_dim,
        scale,
    )


def _affine(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, is_relu: bool = False) -> MatrixParts:
    return MatrixParts(_copy(weight, dtype), None if bias is None else _copy(bias, torch.float32), is_relu)


def _norm(norm: nn.LayerNorm) -> NormParts:
    bias = None if norm.bias is None else _copy(norm.bias, torch.float32)
    return NormParts(_copy(norm.weight, torch.float32), bias, norm.eps)


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype, copy=True).contiguous()
