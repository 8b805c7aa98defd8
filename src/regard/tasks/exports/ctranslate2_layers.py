"""The parts of a Transformer layer in CTranslate2's specifications of models."""

from typing import Any

import torch
from torch import nn

from regard.models.stack import SelfAttentionLayer
from regard.models.transformer import DecoderLayer
from regard.nn import GatedFeedForward
from regard.tasks.exports.trained import split_attention

ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swiglu": "SWISH"}
"""CTranslate2's names of our activations; swiglu is its gated network with SWISH."""


def fill_layer(theirs: Any, ours: SelfAttentionLayer | DecoderLayer) -> None:
    """Write a layer: its projections, its feed-forward network and its norms."""
    parts = split_attention(ours.self_attention)
    fill_linear(theirs.self_attention.linear[0], parts["query"], parts["key"], parts["value"])
    fill_linear(theirs.self_attention.linear[1], parts["output"])
    norms = [theirs.self_attention.layer_norm]
    if isinstance(ours, DecoderLayer):
        parts = split_attention(ours.cross_attention)
        fill_linear(theirs.attention.linear[0], parts["query"])
        fill_linear(theirs.attention.linear[1], parts["key"], parts["value"])
        fill_linear(theirs.attention.linear[2], parts["output"])
        norms.append(theirs.attention.layer_norm)
    network = ours.feed_forward
    if isinstance(network, GatedFeedForward):
        gate, up = network.gate_and_up.weight.chunk(2)
        theirs.ffn.linear_0.weight, theirs.ffn.linear_0_noact.weight = gate.numpy(), up.numpy()
    else:
        fill_linear(theirs.ffn.linear_0, network.get_submodule("up"))
    fill_linear(theirs.ffn.linear_1, network.get_submodule("down"))
    for norm, residual in zip([*norms, theirs.ffn.layer_norm], ours.residuals, strict=True):
        fill_norm(norm, residual.get_submodule("norm"))


def fill_linear(spec: Any, *linears: nn.Module) -> None:
    """Write layers with the same input as one layer: their rows stand one below the other."""
    parameters = [dict(linear.named_parameters()) for linear in linears]
    spec.weight = torch.cat([each["weight"] for each in parameters]).detach().numpy()
    if "bias" in parameters[0]:
        spec.bias = torch.cat([each["bias"] for each in parameters]).detach().numpy()


def fill_norm(spec: Any, norm: nn.Module) -> None:
    """Write the gain, and of a LayerNorm the offset."""
    spec.gamma = norm.get_parameter("weight").numpy()
    if isinstance(norm, nn.LayerNorm):
        spec.beta = norm.bias.numpy()


def epsilon_of(model: nn.Module) -> float:
    """The epsilon of a model's norms, of which CTranslate2 has one."""
    norm = next(module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm))
    return torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
