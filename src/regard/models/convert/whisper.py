"""Whisper (Radford et al. 2022, arXiv:2212.04356): BART's layers behind two convolutions over a spectrogram."""

from functools import partial

import torch

from regard.models.audio_frames import AudioFrames
from regard.models.convert.bart import move_layers, side_parts
from regard.models.convert.folder import Settings
from regard.models.convert.weights import Weights
from regard.models.parts import TransformerParts
from regard.models.transformer import Transformer
from regard.nn import LearnedPositions, PreNorm


def whisper(settings: Settings, weights: Weights) -> Transformer:
    """A Whisper model, whose source is a spectrogram (B, mel bands, 2 S)."""
    weights.strip_prefix("model.")
    weights.rename("proj_out.weight", "lm_head.weight")
    dim, vocab_size = settings.get("d_model", int), settings.get("vocab_size", int)
    positions = {
        side: partial(LearnedPositions, settings.get(f"max_{name}_positions", int), dim)
        for side, name in (("encoder", "source"), ("decoder", "target"))
    }
    tied = _move(settings, weights, dim)
    parts = TransformerParts(
        dim=dim,
        source=partial(AudioFrames, settings.get("num_mel_bins", int, 80), dim),
        encoder=side_parts(settings, "encoder", PreNorm, positions["encoder"]),
        decoder=side_parts(settings, "decoder", PreNorm, positions["decoder"]),
        embedding_scale=1.0,
        dropout=settings.get("dropout", float, 0.0),
        tied_output=tied,
    )
    return weights.build(lambda: Transformer(parts, source_vocab_size=vocab_size, target_vocab_size=vocab_size))


def _move(settings: Settings, weights: Weights, dim: int) -> bool:
    weights.move("encoder.conv1", "source_embedding.near")
    weights.move("encoder.conv2", "source_embedding.halved")
    weights.move("encoder.embed_positions", "source_positions")
    weights.move("decoder.embed_positions", "target_positions")
    tied = weights.tables("target_embedding", "decoder.embed_tokens.weight", tied=True)
    for side, attentions in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        for number in range(settings.get(f"{side}_layers", int)):
            for name in attentions:  # keys have no bias
                weights.give(f"{side}.layers.{number}.{name}.k_proj.bias", torch.zeros(dim))
    move_layers(settings, weights, PreNorm)
    return tied
