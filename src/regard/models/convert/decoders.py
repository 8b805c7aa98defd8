"""Llama (Touvron et al. 2023, arXiv:2302.13971) and the decoders that differ from it in some of their parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from regard.call.masks.patterns import window
from regard.call.rotary.layouts import Interleaved
from regard.errors import RunFolderError
from regard.models.convert.decoder_attention import (
    LatentReader,
    MultiHeadReader,
    Place,
    capped_gemma_score,
    each_head,
    gemma_score,
)
from regard.models.convert.experts import Dense, Experts, StackedExperts, sigmoid_groups, softmax_groups, softmax_router
from regard.models.convert.folder import TIED, Settings
from regard.models.convert.rope import Rope
from regard.models.convert.weights import Weights
from regard.models.decoder_only import DecoderOnly
from regard.models.parts import OneStackParts, StackParts
from regard.nn import AcrossHeads, InnerPostNorm, NoPositions, PreNorm, SandwichNorm
from regard.nn.residual import Residual

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
LayerKind = Callable[[Settings, int], str]


def _always_full(settings: Settings, number: int) -> str:
    return FULL


def _always_sliding(settings: Settings, number: int) -> str:
    return SLIDING


def _upper_sliding(settings: Settings, number: int) -> str:
    is_on = settings.get("use_sliding_window", bool, False)
    return SLIDING if is_on and number >= settings.get("max_window_layers", int, 28) else FULL


def _every(full: int) -> LayerKind:
    """Full attention in every n-th layer; an old Gemma 3 says which."""
    return lambda settings, number: (
        SLIDING if (number + 1) % settings.get("sliding_window_pattern", int, full) else FULL
    )


def _qwen_mixture(settings: Settings, number: int) -> bool:
    every = settings.get("decoder_sparse_step", int, 1)
    return number not in settings.get("mlp_only_layers", list, []) and (number + 1) % every == 0


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """A family: the parts in which it differs from Llama."""

    parts: str
    """These parts in words, for docs/convert.md."""
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    """The names of a layer's norms: theirs, and ours."""
    residual: Callable[..., Residual] = PreNorm
    attention: MultiHeadReader | LatentReader = field(default_factory=MultiHeadReader)
    feed_forward: Dense | Experts | StackedExperts = field(default_factory=Dense)
    gain: float = 0.0
    """Added to the weights of norms: Gemma counts them from 1."""
    rope: Rope = field(default_factory=Rope)
    kind: LayerKind = _always_full
    """The kind of layer n, where the configuration has no `layer_types`."""
    no_positions_every: int | None = None
    scales_embeddings: bool = False
    tied: bool = False
    """Whether the output layer is the embedding, where the configuration does not say."""
    eps: float = 1e-6


_ROUND: dict[str, Any] = {
    "norms": AROUND, "residual": SandwichNorm, "gain": 1.0, "feed_forward": Dense("hidden_activation"),
    "scales_embeddings": True, "tied": True,
}  # fmt: skip
_INNER: dict[str, Any] = {
    "norms": AFTER,
    "residual": InnerPostNorm,
    "attention": MultiHeadReader(qk_norm=AcrossHeads),
    "eps": 1e-5,
}
GEMMA3_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
}  # fmt: skip
"""The sizes that Gemma's own folders leave out."""
_DEEPSEEK: dict[str, Any] = {
    "count": ("n_routed_experts", "num_local_experts"),
    "is_mixture": lambda settings, number: number >= settings.get("first_k_dense_replace", int, 0),
}
DECODERS: dict[str, DecoderFamily] = {
    "llama": DecoderFamily(
        "RMSNorm before each sublayer, SwiGLU, grouped heads, rotary positions with the scalings `linear`, `dynamic`, "
        "`yarn`, `llama3` and `longrope`"
    ),
    "mistral": DecoderFamily("Llama with a window in all layers, or without one", kind=_always_sliding),
    "qwen2": DecoderFamily(
        "Llama with biases of queries, keys and values, and a window in the upper layers if the configuration turns it "
        "on (Qwen2 and 2.5)",
        kind=_upper_sliding,
    ),
    "qwen3": DecoderFamily(
        "Llama with an RMSNorm of each head's queries and keys",
        kind=_upper_sliding, attention=MultiHeadReader(qk_norm=each_head),
    ),
    "gemma2": DecoderFamily(
        "RMSNorm before and after each sublayer, a window in every second layer, capped scores and logits",
        kind=_every(2), attention=MultiHeadReader(capped_gemma_score), **_ROUND,
    ),
    "gemma3_text": DecoderFamily(
        "Gemma 2 without capped scores, with an RMSNorm of each head's queries and keys, a window in five of six "
        "layers, and slower rotary positions in the others",
        kind=_every(6), attention=MultiHeadReader(gemma_score, each_head),
        rope=Rope(base=1_000_000.0, local_base=10_000.0, scales_sliding=False), **_ROUND,
    ),
    "olmo2": DecoderFamily(
        "RMSNorm after each sublayer within the skip connection, and of the queries and keys across heads",
        rope=Rope(base=500_000.0), **_INNER,
    ),
    "olmo3": DecoderFamily(
        "OLMo 2 with a window in three of four layers",
        kind=_every(4), rope=Rope(base=500_000.0, scales_sliding=False), **_INNER,
    ),
    "phi3": DecoderFamily(
        "Llama with packed matrices, and a rotated part of each head (Phi-3 and 4)",
        kind=_always_sliding, rope=Rope(has_parts=True), eps=1e-5,
    ),
    "glm4": DecoderFamily(
        "RMSNorm before and after each sublayer, packed matrices, a part of each head rotated in neighbouring pairs",
        norms=GLM, residual=SandwichNorm, rope=Rope(Interleaved(), has_parts=True), eps=1.5625e-07,
    ),
    "smollm3": DecoderFamily(
        "Llama with every fourth layer without positions", no_positions_every=4, rope=Rope(base=2_000_000.0), tied=True
    ),
    "mixtral": DecoderFamily(
        "Mistral with experts, the best of them by softmax",
        kind=_always_sliding, eps=1e-5,
        feed_forward=Experts(
            softmax_router(True), ("num_local_experts",), "intermediate_size", "block_sparse_moe",
            expert=Dense(names=("w1", "w3", "w2")),
        ),
    ),
    "qwen3_moe": DecoderFamily(
        "Qwen3 with experts, the best of them by softmax",
        kind=_upper_sliding, attention=MultiHeadReader(qk_norm=each_head),
        feed_forward=Experts(softmax_router(False), ("num_experts", "num_local_experts"), is_mixture=_qwen_mixture),
    ),
    "gpt_oss": DecoderFamily(
        "a learned sink for each head, a window in every second layer, experts with a clamped gate",
        kind=_every(2), eps=1e-5, feed_forward=StackedExperts(), rope=Rope(base=150_000.0),
    ),
    "deepseek_v2": DecoderFamily(
        "latent attention; experts, the best of them by softmax, and shared ones",
        attention=LatentReader(), rope=Rope(Interleaved()), feed_forward=Experts(softmax_groups, **_DEEPSEEK),
    ),
    "deepseek_v3": DecoderFamily(
        "latent attention; experts, the best of them by sigmoids in groups, and shared ones (V3, R1)",
        attention=LatentReader(), rope=Rope(Interleaved()), feed_forward=Experts(sigmoid_groups, **_DEEPSEEK),
    ),
}  # fmt: skip
"""From the `model_type` of config.json."""


def decoder(family: DecoderFamily, settings: Settings, weights: Weights) -> DecoderOnly:
    """A model of one of these families."""
    if settings.get("use_bidirectional_attention", bool, False):
        raise RunFolderError(f"{settings.source}: regard reads no decoder with use_bidirectional_attention")
    weights.strip_prefix("model.")
    weights.drop("layers.*.self_attn.rotary_emb.inv_freq")  # computed, not learned
    tied = weights.tables("embedding", "embed_tokens.weight", tied=settings.get(TIED, bool, family.tied))
    weights.move("norm", "final_norm")
    dim = settings.get("hidden_size", int)
    norm = partial(nn.RMSNorm, eps=settings.get("rms_norm_eps", float, family.eps))
    attention, feed_forward = [], []
    for number in range(settings.get("num_hidden_layers", int)):
        place = _place(family, settings, number)
        attention.append(family.attention.read(settings, weights, place, norm))
        feed_forward.append(family.feed_forward.read(settings, weights, place.layer))
        for theirs, ours in family.norms.items():
            weights.move(f"{place.layer}.{theirs}", f"{place.layer}.{ours}")
    if family.gain:
        for name in [name for name in weights.ours if "norm" in name or "residuals" in name]:
            weights.ours[name] = weights.ours[name].float() + family.gain
    stack = StackParts(
        attention=attention,
        feed_forward=feed_forward,
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


def gemma3(settings: Settings, weights: Weights) -> DecoderOnly:
    """The text part of a Gemma 3 that reads images too."""
    weights.strip_prefix("model.")
    weights.strip_prefix("language_model.")
    weights.drop("vision_tower.*", "multi_modal_projector.*")
    values = {**GEMMA3_DEFAULTS, **settings.part("text_config")}
    values |= {name: value for name, value in settings.values.items() if name == TIED}
    # transformers caps the logits of the text model alone, and not those of the model with images.
    values["final_logit_softcapping"] = None
    return decoder(DECODERS["gemma3_text"], Settings(values, settings.source), weights)


def _place(family: DecoderFamily, settings: Settings, number: int) -> Place:
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
    rotary = family.rope.of(settings, family.attention.rotated_width(settings), kind) if has_positions else None
    return Place(f"layers.{number}", None if size is None else window(size), rotary)
