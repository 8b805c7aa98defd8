"""Llama (Touvron et al. 2023, arXiv:2302.13971) and the decoders that differ from it in some of their parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from regard.call.masks.patterns import window
from regard.call.rotary.layouts import Interleaved
from regard.call.scores.base import ScaledDot, Score, SoftCapped
from regard.errors import RunFolderError
from regard.models.convert.activations import ACTIVATIONS
from regard.models.convert.folder import Settings
from regard.models.convert.rope import Rope
from regard.models.convert.weights import Weights
from regard.models.decoder_only import DecoderOnly
from regard.models.parts import OneStackParts, StackParts
from regard.nn import (
    AcrossHeads,
    GatedFeedForward,
    InnerPostNorm,
    MultiHeadAttention,
    NoPositions,
    PreNorm,
    SandwichNorm,
)
from regard.nn.head_norms import HeadNorm
from regard.nn.residual import Residual

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
FULL, SLIDING = "full_attention", "sliding_attention"
BEFORE = {"input_layernorm": "residuals.0.norm", "post_attention_layernorm": "residuals.1.norm"}
AFTER = {"post_attention_layernorm": "residuals.0.norm", "post_feedforward_layernorm": "residuals.1.norm"}
AROUND = {
    "input_layernorm": "residuals.0.norm", "post_attention_layernorm": "residuals.0.after",
    "pre_feedforward_layernorm": "residuals.1.norm", "post_feedforward_layernorm": "residuals.1.after",
}  # fmt: skip
GLM = {
    "input_layernorm": "residuals.0.norm", "post_self_attn_layernorm": "residuals.0.after",
    "post_attention_layernorm": "residuals.1.norm", "post_mlp_layernorm": "residuals.1.after",
}  # fmt: skip
Kind = Callable[[Settings, int], str]


def _always_full(settings: Settings, number: int) -> str:
    return FULL


def _always_sliding(settings: Settings, number: int) -> str:
    return SLIDING


def _upper_sliding(settings: Settings, number: int) -> str:
    is_on = settings.get("use_sliding_window", bool, False)
    return SLIDING if is_on and number >= settings.get("max_window_layers", int, 28) else FULL


def _every(full: int) -> Kind:
    """Full attention in every n-th layer; an old Gemma 3 says which."""
    return lambda settings, number: (
        SLIDING if (number + 1) % settings.get("sliding_window_pattern", int, full) else FULL
    )


def _each_head(norm: HeadNorm) -> HeadNorm:
    return norm


@dataclass(frozen=True, slots=True)
class Decoder:
    """A family: the parts in which it differs from Llama."""

    parts: str
    """These parts in words, for docs/convert.md."""
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    """The names of a layer's norms: theirs, and ours."""
    residual: Callable[..., Residual] = PreNorm
    qk_norm: Callable[[HeadNorm], HeadNorm | AcrossHeads] | None = None
    gain: float = 0.0
    """Added to the weights of norms: Gemma counts them from 1."""
    rope: Rope = field(default_factory=Rope)
    kind: Kind = _always_full
    """The kind of layer n, where the configuration has no `layer_types`."""
    no_positions_every: int | None = None
    score: Callable[[Settings, int], Score] = lambda settings, head_dim: ScaledDot()
    activation: str = "hidden_act"
    scales_embeddings: bool = False
    eps: float = 1e-6


def _gemma_score(settings: Settings, head_dim: int) -> Score:
    score = ScaledDot(settings.get("query_pre_attn_scalar", float, 256.0) ** -0.5)
    cap = settings.optional("attn_logit_softcapping", float)
    return score if cap is None else SoftCapped(score, cap)


_ROUND: dict[str, Any] = {
    "norms": AROUND, "residual": SandwichNorm, "gain": 1.0, "score": _gemma_score, "activation": "hidden_activation",
    "scales_embeddings": True,
}  # fmt: skip
_INNER: dict[str, Any] = {"norms": AFTER, "residual": InnerPostNorm, "qk_norm": AcrossHeads, "eps": 1e-5}
DECODERS: dict[str, Decoder] = {
    "llama": Decoder(
        "RMSNorm before each sublayer, SwiGLU, grouped heads, rotary positions with the scalings `linear`, `dynamic`, "
        "`yarn`, `llama3` and `longrope`"
    ),
    "mistral": Decoder("Llama with a window in all layers, or without one", kind=_always_sliding),
    "qwen2": Decoder(
        "Llama with biases of queries, keys and values, and a window in the upper layers if the configuration turns it "
        "on (Qwen2 and 2.5)",
        kind=_upper_sliding,
    ),
    "qwen3": Decoder("Llama with an RMSNorm of each head's queries and keys", kind=_upper_sliding, qk_norm=_each_head),
    "gemma2": Decoder(
        "RMSNorm before and after each sublayer, a window in every second layer, capped scores and logits",
        kind=_every(2), **_ROUND,
    ),
    "gemma3_text": Decoder(
        "Gemma 2 without caps, with an RMSNorm of each head's queries and keys, a window in five of six layers, and "
        "slower rotary positions in the others",
        kind=_every(6), qk_norm=_each_head, rope=Rope(base=1_000_000.0, local_base=10_000.0, scales_sliding=False),
        **_ROUND,
    ),
    "olmo2": Decoder(
        "RMSNorm after each sublayer within the skip connection, and of the queries and keys across heads",
        rope=Rope(base=500_000.0), **_INNER,
    ),
    "olmo3": Decoder(
        "OLMo 2 with a window in three of four layers",
        kind=_every(4), rope=Rope(base=500_000.0, scales_sliding=False), **_INNER,
    ),
    "phi3": Decoder(
        "Llama with packed matrices, and a rotated part of each head (Phi-3 and 4)",
        kind=_always_sliding, rope=Rope(has_parts=True), eps=1e-5,
    ),
    "glm4": Decoder(
        "RMSNorm before and after each sublayer, packed matrices, a part of each head rotated in neighbouring pairs",
        norms=GLM, residual=SandwichNorm, rope=Rope(Interleaved(), has_parts=True), eps=1.5625e-07,
    ),
    "smollm3": Decoder(
        "Llama with every fourth layer without positions", no_positions_every=4, rope=Rope(base=2_000_000.0)
    ),
}  # fmt: skip
"""From the `model_type` of config.json."""


def decoder(family: Decoder, settings: Settings, weights: Weights) -> DecoderOnly:
    """A model of one of these families."""
    weights.strip_prefix("model.")
    weights.drop("layers.*.self_attn.rotary_emb.inv_freq")  # computed, not learned
    tied = _move(family, settings, weights)
    dim, heads = settings.get("hidden_size", int), settings.get("num_attention_heads", int)
    head_dim = settings.get("head_dim", int, dim // heads)
    norm = partial(nn.RMSNorm, eps=settings.get("rms_norm_eps", float, family.eps))
    attention = partial(
        MultiHeadAttention,
        dim,
        heads,
        num_kv_heads=settings.get("num_key_value_heads", int, heads),
        head_dim=head_dim,
        bias="layers.0.self_attention.in_bias" in weights.ours,
        dropout=settings.get("attention_dropout", float, 0.0),
        score=family.score(settings, head_dim),
        qk_norm=None if family.qk_norm is None else family.qk_norm(norm),
    )
    layers = range(settings.get("num_hidden_layers", int))
    stack = StackParts(
        attention=[partial(attention, **_of_layer(family, settings, number, head_dim)) for number in layers],
        feed_forward=partial(
            GatedFeedForward,
            dim,
            settings.get("intermediate_size", int),
            activation=settings.one_of(family.activation, ACTIVATIONS, "silu"),
            bias="layers.0.feed_forward.down.bias" in weights.ours,
        ),
        residual=partial(family.residual, dim, norm=norm),
        positions=NoPositions,
        final_norm=partial(norm, dim),
    )
    parts = OneStackParts(
        dim=dim,
        stack=stack,
        embedding_scale=dim**0.5 if family.scales_embeddings else 1.0,
        tied_output=tied,
        logit_cap=settings.optional("final_logit_softcapping", float),
    )
    return weights.build(lambda: DecoderOnly(parts, vocab_size=settings.get("vocab_size", int)))


def _of_layer(family: Decoder, settings: Settings, number: int, head_dim: int) -> dict[str, Any]:
    """The parts of a layer's attention that differ from layer to layer."""
    kinds = settings.get("layer_types", list, [])
    kind = kinds[number] if number < len(kinds) else family.kind(settings, number)
    if kind not in (FULL, SLIDING):
        raise RunFolderError(
            f"{settings.source}: layer {number} is of the kind {kind!r}; regard reads {FULL} and {SLIDING}"
        )
    size = settings.optional("sliding_window", int) if kind == SLIDING else None
    every, has_positions = settings.get("no_rope_layers", list, []), True
    if family.no_positions_every is not None:
        step = settings.get("no_rope_layer_interval", int, family.no_positions_every)
        has_positions = bool(every[number]) if number < len(every) else (number + 1) % step != 0
    return {
        "window": None if size is None else window(size),
        "rotary": family.rope.of(settings, head_dim, kind) if has_positions else None,
    }


def _move(family: Decoder, settings: Settings, weights: Weights) -> bool:
    weights.ours["embedding.weight"] = weights.take_any("embed_tokens.weight", "lm_head.weight")
    weights.move("norm", "final_norm")
    for number in range(settings.get("num_hidden_layers", int)):
        layer = f"layers.{number}"
        _move_attention(family, weights, f"{layer}.self_attn", f"{layer}.self_attention")
        gated = f"{layer}.feed_forward.gate_and_up"
        if f"{layer}.mlp.gate_up_proj.weight" in weights:
            weights.move(f"{layer}.mlp.gate_up_proj", gated)
        else:
            weights.join((f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"), f"{gated}.weight", f"{gated}.bias")
        weights.move(f"{layer}.mlp.down_proj", f"{layer}.feed_forward.down")
        for theirs, ours in family.norms.items():
            weights.move(f"{layer}.{theirs}", f"{layer}.{ours}")
    if family.gain:
        for name in [name for name in weights.ours if "norm" in name or "residuals" in name]:
            weights.ours[name] = weights.ours[name].float() + family.gain
    return weights.output("embedding")


def _move_attention(family: Decoder, weights: Weights, theirs: str, ours: str) -> None:
    if f"{theirs}.qkv_proj.weight" in weights:
        weights.ours[f"{ours}.in_weights.0"] = weights.take(f"{theirs}.qkv_proj.weight")
        weights.move(f"{theirs}.o_proj", f"{ours}.out")
    else:
        weights.attention(theirs, ours, PROJECTIONS)
    if f"{ours}.in_bias" in weights.ours and f"{ours}.out.bias" not in weights.ours:
        weights.ours[f"{ours}.out.bias"] = torch.zeros(len(weights.ours[f"{ours}.out.weight"]))
    if family.qk_norm is not None:
        inner = ".norm" if family.qk_norm is AcrossHeads else ""
        weights.move(f"{theirs}.q_norm", f"{ours}.query_norm{inner}")
        weights.move(f"{theirs}.k_norm", f"{ours}.key_norm{inner}")
