"""T5 (Raffel et al. 2020, arXiv:1910.10683), and its version 1.1 with gated feed-forward networks.

It is pre-norm with RMSNorm, without biases in linear layers. Scores are not scaled, and all layers of a stack share
a bias of relative positions. Nothing is added to embeddings, and these are not scaled.
"""

from functools import partial

from torch import nn

from regard.call.scores.base import Dot
from regard.models.convert.activations import ACTIVATIONS
from regard.models.convert.folder import TIED, Settings
from regard.models.convert.weights import SHARED, Weights
from regard.models.parts import Maker, StackParts, TransformerParts
from regard.models.transformer import Transformer
from regard.nn import FeedForward, GatedFeedForward, MultiHeadAttention, NoPositions, PreNorm, RelativeBias

NAMES = ("q", "k", "v", "o")
FEED_FORWARDS: dict[str, tuple[type[FeedForward] | type[GatedFeedForward], str]] = {
    "relu": (FeedForward, "relu"),
    "gelu": (FeedForward, "gelu"),
    "gated-gelu": (GatedFeedForward, "gelu_new"),
    "gated-silu": (GatedFeedForward, "silu"),
    "gated-relu": (GatedFeedForward, "relu"),
}
"""From T5's names to networks and activations: "gated-gelu" is the approximation by tanh, "gelu" the exact function."""


def t5(settings: Settings, weights: Weights) -> Transformer:
    """A T5 model."""
    vocab_size = settings.get("vocab_size", int)
    tied = _move(settings, weights)
    if settings.get("scale_decoder_outputs", bool, settings.get("tie_word_embeddings", bool, True)):
        # A factor between the last norm and the output layer is equivalent to a factor in the norm's gain.
        gain = weights.ours["decoder_norm.weight"].float()
        weights.ours["decoder_norm.weight"] = gain * settings.get("d_model", int) ** -0.5
    parts = TransformerParts(
        dim=settings.get("d_model", int),
        encoder=_stack(settings, _layers(settings, "encoder"), bidirectional=True),
        decoder=_stack(settings, _layers(settings, "decoder"), bidirectional=False),
        embedding_scale=1.0,
        dropout=settings.get("dropout_rate", float, 0.1),
        shared_embeddings=True,
        tied_output=tied,
    )
    return weights.build(lambda: Transformer(parts, source_vocab_size=vocab_size, target_vocab_size=vocab_size))


def _layers(settings: Settings, side: str) -> int:
    layers = settings.get("num_layers", int)
    return layers if side == "encoder" else settings.get("num_decoder_layers", int, layers)


def _stack(settings: Settings, num_layers: int, *, bidirectional: bool) -> StackParts:
    dim, heads = settings.get("d_model", int), settings.get("num_heads", int)
    dropout = settings.get("dropout_rate", float, 0.1)
    norm = partial(nn.RMSNorm, eps=settings.get("layer_norm_epsilon", float, 1e-6))
    return StackParts(
        attention=[
            partial(
                MultiHeadAttention,
                dim,
                heads,
                head_dim=settings.get("d_kv", int),
                bias=False,
                dropout=dropout,
                score=Dot(),
            )
        ]
        * num_layers,
        feed_forward=[_feed_forward(settings, dim, dropout)] * num_layers,
        residual=partial(PreNorm, dim, dropout=dropout, norm=norm),
        positions=NoPositions,
        relative=partial(
            RelativeBias,
            heads,
            num_buckets=settings.get("relative_attention_num_buckets", int, 32),
            bidirectional=bidirectional,
            max_distance=settings.get("relative_attention_max_distance", int, 128),
        ),
        final_norm=partial(norm, dim),
    )


def _feed_forward(settings: Settings, dim: int, dropout: float) -> Maker:
    network, activation = settings.one_of("feed_forward_proj", FEED_FORWARDS, "relu")
    return partial(
        network,
        dim,
        settings.get("d_ff", int),
        activation=ACTIVATIONS[activation],
        dropout=dropout,
        bias=False,
    )


def _move(settings: Settings, weights: Weights) -> bool:
    tied = weights.tables("target_embedding", *SHARED, tied=settings.get(TIED, bool, True))
    weights.ours["source_embedding.weight"] = weights.ours["target_embedding.weight"]
    # Some folders hold a table for attention to the source, unused by any version of the model.
    weights.drop("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight")
    for side in ("encoder", "decoder"):
        table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        weights.ours[f"{side}_bias.weight"] = weights.take(table)
        weights.move(f"{side}.final_layer_norm", f"{side}_norm")
        for number in range(_layers(settings, side)):
            theirs, ours = f"{side}.block.{number}.layer", f"{side}.{number}"
            weights.attention(f"{theirs}.0.SelfAttention", f"{ours}.self_attention", NAMES)
            if side == "decoder":
                weights.attention(f"{theirs}.1.EncDecAttention", f"{ours}.cross_attention", NAMES)
            last = 2 if side == "decoder" else 1
            network = f"{theirs}.{last}.DenseReluDense"
            if f"{network}.wi.weight" in weights:
                weights.move(f"{network}.wi", f"{ours}.feed_forward.up")
            else:
                gated = f"{ours}.feed_forward.gate_and_up"
                weights.join((f"{network}.wi_0", f"{network}.wi_1"), f"{gated}.weight", f"{gated}.bias")
            weights.move(f"{network}.wo", f"{ours}.feed_forward.down")
            for place in range(last + 1):
                weights.move(f"{theirs}.{place}.layer_norm", f"{ours}.residuals.{place}.norm")
    return tied
