"""From the settings of a Transformer of one stack to its parts."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import nn

from regard.call.masks.patterns import window
from regard.call.rotary.rotary import Rotary
from regard.models.config import OneStackConfig
from regard.models.layer_pattern import read_layers
from regard.models.parts import MakeAttention, Maker, OneStackParts
from regard.models.stack import attention_of, make_stack
from regard.nn import GatedDeltaNet, LightningAttention, Mamba2

WindowSide = Literal["left", "both"]
"""The keys of a window: before the query in a decoder, around it in an encoder."""


def one_stack_parts(
    config: OneStackConfig, side: WindowSide, *, head: Maker = nn.Identity, output_bias: bool = False
) -> OneStackParts:
    """The parts of a decoder-only or an encoder-only Transformer."""
    return OneStackParts(
        dim=config.dim,
        stack=make_stack(config, [_attention(config, side, number) for number in range(config.num_layers)]),
        embedding_gain=config.embedding_gain,
        dropout=config.dropout,
        head=head,
        tied_output=config.tied_output,
        output_bias=output_bias,
    )


RECURRENT_LAYERS: dict[str, Callable[[OneStackConfig, int], MakeAttention]] = {
    "gated_delta": lambda config, number: partial(GatedDeltaNet, config.dim, config.num_heads),
    "mamba2": lambda config, number: partial(Mamba2, config.dim, config.num_heads),
    "lightning": lambda config, number: partial(
        LightningAttention, config.dim, config.num_heads, layer=number, num_layers=config.num_layers
    ),
}


def _attention(config: OneStackConfig, side: WindowSide, number: int) -> MakeAttention:
    kinds = read_layers(config.layers)
    if (recurrent := RECURRENT_LAYERS.get(kinds[number % len(kinds)])) is not None:
        return recurrent(config, number)
    parts: dict[str, Any] = {"sink": config.sink, "gate": None if config.gate == "none" else config.gate}
    if config.qk_norm:
        parts["qk_norm"] = partial(nn.RMSNorm, eps=1e-6)
    if kinds[number % len(kinds)] == "sliding" and config.window is not None:
        parts["window"] = window(config.window, side=side)
    if config.positions == "rotary":
        is_without = config.no_positions_every is not None and (number + 1) % config.no_positions_every == 0
        head_dim = config.dim // config.num_heads
        parts["rotary"] = None if is_without else Rotary(head_dim, fraction=config.rotary_fraction)
    return attention_of(config, **parts)
