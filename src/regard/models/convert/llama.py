"""Llama (Touvron et al. 2023, arXiv:2302.13971) and its successors: pre-norm, RMSNorm, SwiGLU, rotary positions."""

from collections.abc import Callable
from functools import partial

from torch import nn

from regard.call.rotary.rotary import Rotary
from regard.call.rotary.scalings import DynamicNTK, Llama3, LongRoPE, PositionInterpolation, Scaling, YaRN
from regard.errors import RunFolderError
from regard.models.convert.activations import ACTIVATIONS
from regard.models.convert.folder import Settings
from regard.models.convert.weights import Weights
from regard.models.decoder_only import DecoderOnly
from regard.models.parts import OneStackParts, StackParts
from regard.nn import GatedFeedForward, MultiHeadAttention, NoPositions, PreNorm

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")


def llama(settings: Settings, weights: Weights) -> DecoderOnly:
    """A Llama model."""
    weights.strip_prefix("model.")
    weights.drop("layers.*.self_attn.rotary_emb.inv_freq")  # computed, not learned
    tied = _move(settings, weights)
    dim, heads = settings.get("hidden_size", int), settings.get("num_attention_heads", int)
    head_dim = settings.get("head_dim", int, dim // heads)
    norm = partial(nn.RMSNorm, eps=settings.get("rms_norm_eps", float, 1e-6))
    stack = StackParts(
        attention=[
            partial(
                MultiHeadAttention,
                dim,
                heads,
                num_kv_heads=settings.get("num_key_value_heads", int, heads),
                head_dim=head_dim,
                bias=settings.get("attention_bias", bool, False),
                dropout=settings.get("attention_dropout", float, 0.0),
                rotary=_rotary(settings, head_dim),
            )
        ]
        * settings.get("num_hidden_layers", int),
        feed_forward=partial(
            GatedFeedForward,
            dim,
            settings.get("intermediate_size", int),
            activation=settings.one_of("hidden_act", ACTIVATIONS, "silu"),
            bias=settings.get("mlp_bias", bool, False),
        ),
        residual=partial(PreNorm, dim, norm=norm),
        positions=NoPositions,
        final_norm=partial(norm, dim),
    )
    parts = OneStackParts(dim=dim, stack=stack, embedding_scale=1.0, tied_output=tied)
    return weights.build(lambda: DecoderOnly(parts, vocab_size=settings.get("vocab_size", int)))


def _move(settings: Settings, weights: Weights) -> bool:
    weights.ours["embedding.weight"] = weights.take_any("embed_tokens.weight", "lm_head.weight")
    weights.move("norm", "final_norm")
    for number in range(settings.get("num_hidden_layers", int)):
        theirs, ours = f"layers.{number}", f"layers.{number}"
        weights.attention(f"{theirs}.self_attn", f"{ours}.self_attention", NAMES)
        gated = f"{ours}.feed_forward.gate_and_up"
        weights.join((f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj"), f"{gated}.weight", f"{gated}.bias")
        weights.move(f"{theirs}.mlp.down_proj", f"{ours}.feed_forward.down")
        weights.move(f"{theirs}.input_layernorm", f"{ours}.residuals.0.norm")
        weights.move(f"{theirs}.post_attention_layernorm", f"{ours}.residuals.1.norm")
    return weights.output("embedding")


def _rotary(settings: Settings, head_dim: int) -> Rotary:
    values = settings.part("rope_parameters") or settings.part("rope_scaling")
    base = settings.get("rope_theta", float, 10_000.0)
    rope = Settings({"rope_theta": base, **values}, settings.source)
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    if kind not in SCALINGS:
        raise RunFolderError(f"{settings.source}: rope_type is {kind!r}, and regard reads {', '.join(SCALINGS)}")
    return Rotary(
        head_dim,
        base=rope.get("rope_theta", float),
        scaling=SCALINGS[kind](rope, settings.get("max_position_embeddings", int, 2048)),
        fraction=rope.get("partial_rotary_factor", float, 1.0) if kind != "default" else 1.0,
    )


def _yarn(rope: Settings, longest: int) -> Scaling:
    original = rope.get("original_max_position_embeddings", int, longest)
    return YaRN(
        factor=rope.get("factor", float, longest / original),
        original_length=original,
        beta_fast=rope.get("beta_fast", float, 32.0),
        beta_slow=rope.get("beta_slow", float, 1.0),
        truncate=rope.get("truncate", bool, True),
        attention_factor=rope.optional("attention_factor", float),
    )


def _llama3(rope: Settings, longest: int) -> Scaling:
    return Llama3(
        factor=rope.get("factor", float),
        low_frequency=rope.get("low_freq_factor", float),
        high_frequency=rope.get("high_freq_factor", float),
        original_length=rope.get("original_max_position_embeddings", int),
    )


def _longrope(rope: Settings, longest: int) -> Scaling:
    original = rope.get("original_max_position_embeddings", int, longest)
    return LongRoPE(
        short_factor=rope.floats("short_factor"),
        long_factor=rope.floats("long_factor"),
        factor=rope.get("factor", float, longest / original),
        original_length=original,
        attention_factor=rope.optional("attention_factor", float),
    )


Scale = Callable[[Settings, int], Scaling | None]

SCALINGS: dict[str, Scale] = {
    "default": lambda rope, longest: None,
    "linear": lambda rope, longest: PositionInterpolation(rope.get("factor", float)),
    "dynamic": lambda rope, longest: DynamicNTK(factor=rope.get("factor", float), original_length=longest),
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
"""From the `rope_type` of a configuration to a function of its values and the longest sequence."""
