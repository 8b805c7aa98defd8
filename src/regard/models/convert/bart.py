"""BART (Lewis et al. 2020, arXiv:1910.13461) and Marian (Junczys-Dowmunt et al. 2018, arXiv:1804.00344).

Both are the post-norm Transformer of the paper, with a learned bias for each token added to the logits. Marian's
positions are sinusoidal, sines first. BART's positions are learned, and its embeddings are normalised. Marian with the
norm before each sublayer is Pegasus (Zhang et al. 2020, arXiv:1912.08777). BART with the norm before each sublayer and
without the norm of embeddings is Blenderbot (Roller et al. 2021, arXiv:2004.13637).
"""

from functools import partial

import torch
from torch import nn

from regard.call.rotary.layouts import Half
from regard.models.convert.activations import ACTIVATIONS
from regard.models.convert.folder import TIED, Settings
from regard.models.convert.weights import SHARED, Weights
from regard.models.parts import Maker, StackParts, TransformerParts
from regard.models.transformer import Transformer
from regard.nn import FeedForward, LearnedPositions, MultiHeadAttention, PostNorm, PreNorm, SinusoidalPositions

NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")
OFFSET = 2
"""Unused rows at the start of BART's table of positions: its code reads row position + 2."""


def marian(settings: Settings, weights: Weights) -> Transformer:
    """A Marian model."""
    return _transformer(settings, weights, PostNorm, *_sinusoidal(settings, weights))


def pegasus(settings: Settings, weights: Weights) -> Transformer:
    """A Pegasus model."""
    return _transformer(settings, weights, PreNorm, *_sinusoidal(settings, weights))


def bart(settings: Settings, weights: Weights) -> Transformer:
    """A BART model."""
    weights.strip_prefix("model.")
    weights.drop("encoder.version", "decoder.version")
    positions = _learned(settings, weights, OFFSET)
    for theirs, ours in (("encoder", "source"), ("decoder", "target")):
        weights.move(f"{theirs}.layernorm_embedding", f"{ours}_norm")
    norm = partial(nn.LayerNorm, settings.get("d_model", int))
    return _transformer(settings, weights, PostNorm, positions, norm)


def blenderbot(settings: Settings, weights: Weights) -> Transformer:
    """A Blenderbot model."""
    weights.strip_prefix("model.")
    return _transformer(settings, weights, PreNorm, _learned(settings, weights, 0))


def _sinusoidal(settings: Settings, weights: Weights) -> tuple[Maker]:
    weights.strip_prefix("model.")
    weights.drop("encoder.embed_positions.weight", "decoder.embed_positions.weight")  # computed, not learned
    return (partial(SinusoidalPositions, settings.get("d_model", int), Half()),)


def _learned(settings: Settings, weights: Weights, offset: int) -> Maker:
    for theirs, ours in (("encoder", "source"), ("decoder", "target")):
        weights.ours[f"{ours}_positions.weight"] = weights.take(f"{theirs}.embed_positions.weight")[offset:]
    length, dim = settings.get("max_position_embeddings", int), settings.get("d_model", int)
    return partial(LearnedPositions, length, dim)


def _transformer(
    settings: Settings,
    weights: Weights,
    block: type[PreNorm] | type[PostNorm],
    positions: Maker,
    embedding_norm: Maker = nn.Identity,
) -> Transformer:
    vocab_size = settings.get("vocab_size", int)
    shared = settings.get("share_encoder_decoder_embeddings", bool, True) and not weights.differ(
        "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
    )
    tied = _move_embeddings(settings, weights, shared)
    move_layers(settings, weights, block)
    parts = TransformerParts(
        dim=settings.get("d_model", int),
        encoder=side_parts(settings, "encoder", block, positions, embedding_norm),
        decoder=side_parts(settings, "decoder", block, positions, embedding_norm),
        embedding_scale=None if settings.get("scale_embedding", bool, False) else 1.0,
        dropout=settings.get("dropout", float, 0.1),
        shared_embeddings=shared,
        tied_output=tied,
        output_bias=True,
    )
    target_vocab_size = settings.get("decoder_vocab_size", int, vocab_size)
    if "output.bias" not in weights.ours:
        weights.ours["output.bias"] = torch.zeros(len(weights.ours["output.weight"]))
    return weights.build(lambda: Transformer(parts, source_vocab_size=vocab_size, target_vocab_size=target_vocab_size))


def side_parts(
    settings: Settings,
    side: str,
    block: type[PreNorm] | type[PostNorm],
    positions: Maker,
    embedding_norm: Maker = nn.Identity,
) -> StackParts:
    """The parts of the encoder or of the decoder."""
    dim, heads = settings.get("d_model", int), settings.get(f"{side}_attention_heads", int)
    attention = partial(MultiHeadAttention, dim, heads, dropout=settings.get("attention_dropout", float, 0.0))
    return StackParts(
        attention=[attention] * settings.get(f"{side}_layers", int),
        feed_forward=[
            partial(
                FeedForward,
                dim,
                settings.get(f"{side}_ffn_dim", int),
                activation=settings.one_of("activation_function", ACTIVATIONS, "gelu"),
                dropout=settings.get("activation_dropout", float, 0.0),
            )
        ]
        * settings.get(f"{side}_layers", int),
        residual=partial(block, dim, dropout=settings.get("dropout", float, 0.1)),
        positions=positions,
        embedding_norm=embedding_norm,
        final_norm=partial(nn.LayerNorm, dim) if block.needs_final_norm else nn.Identity,
    )


def _move_embeddings(settings: Settings, weights: Weights, shared: bool) -> bool:
    if not shared:
        weights.move("encoder.embed_tokens", "source_embedding")
        weights.drop("shared.weight")
    names = SHARED if shared else ("decoder.embed_tokens.weight",)
    tied = weights.tables("target_embedding", *names, tied=settings.get(TIED, bool, True))
    if shared:
        weights.ours["source_embedding.weight"] = weights.ours["target_embedding.weight"]
    if "final_logits_bias" in weights:
        weights.ours["output.bias"] = weights.take("final_logits_bias").flatten()
    return tied


def move_layers(settings: Settings, weights: Weights, block: type[PreNorm] | type[PostNorm]) -> None:
    """Move the layers of both sides, and the norms after them."""
    for side in ("encoder", "decoder"):
        if block.needs_final_norm:
            weights.move(f"{side}.layer_norm", f"{side}_norm")
        for number in range(settings.get(f"{side}_layers", int)):
            theirs, ours = f"{side}.layers.{number}", f"{side}.{number}"
            norms = ["self_attn_layer_norm", "final_layer_norm"]
            weights.attention(f"{theirs}.self_attn", f"{ours}.self_attention", NAMES)
            if side == "decoder":
                weights.attention(f"{theirs}.encoder_attn", f"{ours}.cross_attention", NAMES)
                norms.insert(1, "encoder_attn_layer_norm")
            weights.move(f"{theirs}.fc1", f"{ours}.feed_forward.up")
            weights.move(f"{theirs}.fc2", f"{ours}.feed_forward.down")
            for place, norm in enumerate(norms):
                weights.move(f"{theirs}.{norm}", f"{ours}.residuals.{place}.norm")
