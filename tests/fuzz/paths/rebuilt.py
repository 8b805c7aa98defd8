"""The outputs of torch's modules, computed in float64 from given weights of attention."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Weights = dict[str, Tensor]
"""The weights (N, H, T, S) or (H, T, S) by the path of the module."""


def of_heads(weights: Tensor) -> Tensor:
    return weights if weights.dim() == 4 else weights[None]


def multi_head_output(module: nn.MultiheadAttention, value: Tensor, weights: Tensor) -> Tensor:
    """(N, T, E) from values (N, S, E) and weights (N, H, T, S)."""
    matrix = module.v_proj_weight if module.in_proj_weight is None else module.in_proj_weight.chunk(3)[2]
    bias = None if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[2].double()
    projected = F.linear(value.double(), matrix.double(), bias)
    rows = [projected]
    if module.bias_v is not None:
        rows.append(module.bias_v.double().expand(len(value), 1, -1))
    if module.add_zero_attn:
        rows.append(projected.new_zeros(len(value), 1, projected.shape[-1]))
    heads = torch.cat(rows, 1).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
    mixed = (weights @ heads).transpose(1, 2).flatten(2)
    out = module.out_proj
    return F.linear(mixed, out.weight.double(), None if out.bias is None else out.bias.double()).detach()


def encoder_output(module: Any, x: Tensor, weights: Weights, inside: str = "") -> Tensor:
    """The output of nn.TransformerEncoder or of one layer, (N, T, E)."""
    if isinstance(module, nn.TransformerEncoderLayer):
        return _encoder_layer(module, x.double(), weights[f"{inside}self_attn"])
    x = x.double()
    for n, layer in enumerate(module.layers):
        x = _encoder_layer(layer, x, weights[f"{inside}layers.{n}.self_attn"])
    return x if module.norm is None else _double(module.norm)(x)


def decoder_output(module: Any, x: Tensor, memory: Tensor, weights: Weights, inside: str = "") -> Tensor:
    """The output of nn.TransformerDecoder or of one layer, (N, T, E)."""
    layers = [("", module)] if isinstance(module, nn.TransformerDecoderLayer) else [
        (f"layers.{n}.", layer) for n, layer in enumerate(module.layers)
    ]  # fmt: skip
    x = x.double()
    for path, layer in layers:
        own, cross = (weights[f"{inside}{path}{name}"] for name in ("self_attn", "multihead_attn"))
        x = _decoder_layer(layer, x, memory.double(), own, cross)
    norm = getattr(module, "norm", None)
    return x if norm is None else _double(norm)(x)


def _encoder_layer(layer: Any, x: Tensor, weights: Tensor) -> Tensor:
    wide = _double(layer)
    if layer.norm_first:
        x = x + multi_head_output(layer.self_attn, wide.norm1(x), weights)
        return x + _feed_forward(wide, wide.norm2(x))
    x = wide.norm1(x + multi_head_output(layer.self_attn, x, weights))
    return wide.norm2(x + _feed_forward(wide, x))


def _decoder_layer(layer: Any, x: Tensor, memory: Tensor, own: Tensor, cross: Tensor) -> Tensor:
    wide = _double(layer)
    if layer.norm_first:
        x = x + multi_head_output(layer.self_attn, wide.norm1(x), own)
        x = x + multi_head_output(layer.multihead_attn, memory, cross)
        return x + _feed_forward(wide, wide.norm3(x))
    x = wide.norm1(x + multi_head_output(layer.self_attn, x, own))
    x = wide.norm2(x + multi_head_output(layer.multihead_attn, memory, cross))
    return wide.norm3(x + _feed_forward(wide, x))


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    return layer.linear2(layer.activation(layer.linear1(x)))


def _double(module: nn.Module) -> Any:
    return copy.deepcopy(module).double().requires_grad_(False)
