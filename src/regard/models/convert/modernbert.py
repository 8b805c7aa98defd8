"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): pre-norm, rotary positions, windows in two of three layers."""

from functools import partial

from torch import nn

from regard.call.masks.patterns import window
from regard.models.convert.activations import ACTIVATIONS
from regard.models.convert.bert import NoHead, Transform
from regard.models.convert.folder import Settings
from regard.models.convert.rope import Rope
from regard.models.convert.weights import Weights
from regard.models.encoder_only import EncoderOnly
from regard.models.parts import OneStackParts, StackParts
from regard.nn import GatedFeedForward, MultiHeadAttention, NoPositions, PreNorm

ROPE = Rope(base=160_000.0, local_base=10_000.0)


def modernbert(settings: Settings, weights: Weights) -> EncoderOnly:
    """A ModernBERT encoder, with its head for masked tokens if there is one."""
    old = {"rope_theta": "global_rope_theta", "rope_local_base_freq": "local_rope_theta"}
    values = {name: settings.values.get(theirs) for name, theirs in old.items()}
    settings = Settings({**settings.values, **values}, settings.source)
    weights.strip_prefix("model.")
    weights.drop("classifier.*")
    has_head = _move(settings, weights)
    dim, heads = settings.get("hidden_size", int), settings.get("num_attention_heads", int)
    norm = partial(nn.LayerNorm, eps=settings.get("norm_eps", float, 1e-5), bias=settings.get("norm_bias", bool, False))
    attention = partial(MultiHeadAttention, dim, heads, bias=settings.get("attention_bias", bool, False))
    around = window(settings.get("local_attention", int, 128) // 2 * 2 + 1, side="both")
    kinds = [_kind(settings, number) for number in range(settings.get("num_hidden_layers", int))]
    rotaries = {kind: ROPE.of(settings, dim // heads, kind) for kind in set(kinds)}
    stack = StackParts(
        attention=[
            partial(attention, rotary=rotaries[kind], window=around if kind == "sliding_attention" else None)
            for kind in kinds
        ],
        feed_forward=[
            partial(
                GatedFeedForward,
                dim,
                settings.get("intermediate_size", int),
                activation=settings.one_of("hidden_activation", ACTIVATIONS, "gelu"),
                bias=settings.get("mlp_bias", bool, False),
            )
        ]
        * len(kinds),
        residual=partial(PreNorm, dim, norm=norm),
        positions=NoPositions,
        embedding_norm=partial(norm, dim),
        final_norm=partial(norm, dim),
    )
    activation = settings.one_of("classifier_activation", ACTIVATIONS, "gelu")
    head = partial(Transform, dim, activation, norm, bias=settings.get("classifier_bias", bool, False))
    parts = OneStackParts(
        dim=dim,
        stack=stack,
        embedding_scale=1.0,
        head=head if has_head else NoHead,
        output_bias="output.bias" in weights.ours,
    )

    def make() -> EncoderOnly:
        model = EncoderOnly(parts, vocab_size=settings.get("vocab_size", int))
        next(model.each_layer()).residuals[0].norm = nn.Identity()  # the embeddings are normalised already
        return model

    return weights.build(make)


def _kind(settings: Settings, number: int) -> str:
    kinds = settings.get("layer_types", list, [])
    every = settings.get("global_attn_every_n_layers", int, 3)
    return kinds[number] if number < len(kinds) else "sliding_attention" if number % every else "full_attention"


def _move(settings: Settings, weights: Weights) -> bool:
    weights.move("embeddings.tok_embeddings", "embedding")
    weights.move("embeddings.norm", "embedding_norm")
    weights.move("final_norm", "final_norm")
    for number in range(settings.get("num_hidden_layers", int)):
        layer = f"layers.{number}"
        packed = f"{layer}.self_attention"
        weights.ours[f"{packed}.in_weights.0"] = weights.take(f"{layer}.attn.Wqkv.weight")
        if f"{layer}.attn.Wqkv.bias" in weights:
            weights.ours[f"{packed}.in_bias"] = weights.take(f"{layer}.attn.Wqkv.bias")
        weights.move(f"{layer}.attn.Wo", f"{packed}.out")
        weights.move(f"{layer}.mlp.Wi", f"{layer}.feed_forward.gate_and_up")
        weights.move(f"{layer}.mlp.Wo", f"{layer}.feed_forward.down")
        if number:
            weights.move(f"{layer}.attn_norm", f"{layer}.residuals.0.norm")
        weights.move(f"{layer}.mlp_norm", f"{layer}.residuals.1.norm")
    has_head = "head.dense.weight" in weights
    if has_head:
        weights.move("head.dense", "head.linear")
        weights.move("head.norm", "head.norm")
    embedding = weights.ours["embedding.weight"]
    weights.ours["output.weight"] = weights.take("decoder.weight") if "decoder.weight" in weights else embedding
    if "decoder.bias" in weights:
        weights.ours["output.bias"] = weights.take("decoder.bias")
    return has_head
