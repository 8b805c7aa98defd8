"""The common part of all Transformers: the makers of the parts of a stack, and its layer of self-attention.

A variant of the model is another maker, not a flag.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Integer
from torch import Tensor, nn

from regard.call.masks.base import Mask
from regard.call.masks.basic import lengths
from regard.call.rotary.rotary import Rotary
from regard.functional import Attended
from regard.models.config import StackConfig
from regard.models.protocol import RecordMap
from regard.nn import (
    FeedForward,
    GatedFeedForward,
    LatentAttention,
    LearnedPositions,
    MultiHeadAttention,
    NoPositions,
    PostNorm,
    PreNorm,
    SinusoidalPositions,
)
from regard.nn.cache import MixerCache, Past
from regard.nn.recurrent_mixers import RecurrentMixer
from regard.nn.residual import Residual
from regard.tensors.guards import is_function_observed, is_recorded, may_be_kept
from regard.tensors.ranges import require_sizes

Maker = Callable[[], nn.Module]
MakeAttention = Callable[[], MultiHeadAttention | LatentAttention | RecurrentMixer]
"""A function that makes the attention of one layer, or its linear attention. Attention to a source needs the multi-head
one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackParts:
    attention: Sequence[MakeAttention]
    """For each layer, makes its self-attention and, in a decoder, its attention to the source."""
    feed_forward: Sequence[Maker]
    """For each layer, makes its feed-forward network, (..., D) to (..., D)."""
    residual: Callable[[], Residual]
    """Makes the skip connection and the norm around each of these."""
    positions: Maker
    """Makes the module of positions, (B, T, D) to (B, T, D) with an `offset`."""
    final_norm: Maker = nn.Identity

    @property
    def num_layers(self) -> int:
        return len(self.attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerParts:
    dim: int
    """Width of the model; the paper's d_model."""
    source: Maker | None = None
    """Makes the module from sources to vectors (B, S, D), such as `Patches`; by default tokens are embedded."""
    encoder: StackParts
    decoder: StackParts
    embedding_gain: float = 1.0
    """The factor by which embeddings begin smaller than 1 / sqrt(dim), and are scaled above sqrt(dim)."""
    dropout: float = 0.0
    """Probability of dropping an entry of the embeddings."""
    shared_embeddings: bool = False
    tied_output: bool = True
    """Whether the output layer shares the matrix of the target embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStackParts:
    dim: int
    inputs: Maker | None = None
    """Makes the module from inputs to vectors (B, T, D), such as `Patches`; by default tokens are embedded."""
    stack: StackParts
    embedding_gain: float = 1.0
    """The factor by which embeddings begin smaller than 1 / sqrt(dim), and are scaled above sqrt(dim)."""
    dropout: float = 0.0
    head: Maker = nn.Identity
    """Makes the module between the last layer and the output layer, (..., D) to (..., D)."""
    tied_output: bool = True
    output_bias: bool = False
    """Whether the logits have a learned bias for each token."""


Body = TypeVar("Body", bound=nn.Module)
NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
BLOCKS: dict[str, type[PreNorm] | type[PostNorm]] = {"pre": PreNorm, "post": PostNorm}
FEED_FORWARDS: dict[str, Callable[..., nn.Module]] = {
    "relu": partial(FeedForward, activation=nn.functional.relu),
    "gelu": partial(FeedForward, activation=nn.functional.gelu),
    "swiglu": GatedFeedForward,
}
POSITIONS: dict[str, Callable[["StackConfig"], Maker]] = {
    "sinusoidal": lambda config: partial(SinusoidalPositions, config.dim),
    "learned": lambda config: partial(LearnedPositions, config.max_length, config.dim),
    "rotary": lambda config: NoPositions,
}


def make_stack(config: StackConfig, attentions: Sequence[MakeAttention], *, sublayers: int = 2) -> StackParts:
    """The makers of a configuration's parts, for layers of so many sublayers with these attentions.

    With post-norm, the last matrix of each of the n sublayers of a stack begins smaller by the square root of n (the
    factor of GPT-2: Radford et al. 2019, section 2.3), which makes the first updates those of a shallow model. With
    pre-norm it begins as it is.

    >>> config = StackConfig(dim=8, num_heads=2, norm="rms")
    >>> make_stack(config, [attention_of(config)] * 2).final_norm()
    RMSNorm((8,), eps=None, elementwise_affine=True)
    """
    require_sizes(num_layers=len(attentions))
    hidden_dropout = config.dropout if config.activation_dropout is None else config.activation_dropout
    norm, block = NORMS[config.norm], BLOCKS[config.norm_position]
    feed_forward = partial(
        FEED_FORWARDS[config.activation], config.dim, config.feed_forward_dim, dropout=hidden_dropout
    )
    if config.norm_position == "post":
        gain = (sublayers * len(attentions)) ** -0.5
        attentions = [partial(_smaller, attention, gain) for attention in attentions]
        feed_forward = partial(_smaller, feed_forward, gain)
    return StackParts(
        attention=attentions,
        feed_forward=[feed_forward] * len(attentions),
        residual=partial(block, config.dim, dropout=config.dropout, norm=norm),
        positions=POSITIONS[config.positions](config),
        final_norm=partial(norm, config.dim) if block.needs_final_norm else nn.Identity,
    )


def attention_of(config: StackConfig, **parts: Any) -> MakeAttention:
    rotary = Rotary(config.dim // config.num_heads) if config.positions == "rotary" else None
    shared = {"num_kv_heads": config.num_kv_heads, "dropout": config.attention_dropout, "rotary": rotary}
    return partial(MultiHeadAttention, config.dim, config.num_heads, **(shared | parts))


def _smaller(make: Callable[[], Body], gain: float) -> Body:
    made = make()
    last = cast(nn.Linear, made.out if isinstance(made, MultiHeadAttention | RecurrentMixer) else made.down)
    with torch.no_grad():
        last.weight.mul_(gain)
    return made


class SelfAttentionLayer(nn.Module):
    """Self-attention, then a feed-forward network: a layer of an encoder or of a decoder-only model."""

    def __init__(self, parts: StackParts, number: int) -> None:
        super().__init__()
        self.self_attention: Any = parts.attention[number]()
        self.feed_forward = parts.feed_forward[number]()
        self.residuals = nn.ModuleList([parts.residual() for _ in range(2)])

    def forward(
        self,
        x: Tensor,
        mask: Mask | None,
        record: RecordMap | None,
        name: str,
        past: Past | None = None,
    ) -> Tensor:
        around_attention, around_network = self.residuals
        x = around_attention(
            x, lambda y: recorded_attention(self.self_attention, record, name, y, mask=mask, past=past)
        )
        return cast(Tensor, around_network(x, self.feed_forward))

    def extend(
        self, x: Tensor, cache: MixerCache | None, mask: Mask, offset: int | Tensor
    ) -> tuple[Tensor, MixerCache]:
        past = Past(cache, offset)
        return self(x, mask, None, "", past), past.cache


def recorded_attention(
    attention: nn.Module,
    record: RecordMap | None,
    name: str,
    *inputs: Tensor,
    mask: Mask | None,
    past: Past | None = None,
) -> Tensor:
    later: dict[str, Any] = {} if past is None else {"past": past}
    attended = attention(*inputs, mask=mask, return_weights=record is not None, **later)
    if not isinstance(attended, Attended):
        return attended
    assert record is not None
    record(name, attended.weights)
    return attended.output


def padding_mask(valid: Integer[Tensor, " B"], sequences: Tensor, record: RecordMap | None = None) -> Mask | None:
    """`lengths(valid)` for sequences (B, S, ...), or None without padding: computed once for all layers.

    The check takes as long as one layer's would. With gradients recorded, or with observers of the mask, the mask
    stays.
    """
    valid = valid.long()
    is_looked_at = record is not None or is_recorded() or is_function_observed()
    return None if not is_looked_at and _are_whole(valid, sequences) else lengths(valid)


def _are_whole(valid: Tensor, sequences: Tensor) -> bool:
    is_one_each = valid.shape == sequences.shape[:1] and valid.dtype in (torch.int64, torch.int32)
    if not is_one_each or 0 in sequences.shape[:2] or type(valid) is not Tensor or not may_be_kept(valid):
        return False
    return min(valid.tolist()) >= sequences.shape[1]
