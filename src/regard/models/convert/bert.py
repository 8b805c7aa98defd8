"""BERT (Devlin et al. 2019, arXiv:1810.04805): the encoder, and the head for masked tokens if there is one.

It is post-norm with learned positions and segments, and its embeddings are normalised. The pooler and the other heads
are left out.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, RunFolderError
from regard.models.convert.activations import ACTIVATIONS
from regard.models.convert.folder import Settings
from regard.models.convert.weights import Weights
from regard.models.encoder_only import EncoderOnly
from regard.models.parts import OneStackParts, StackParts
from regard.nn import FeedForward, LearnedPositions, MultiHeadAttention, PostNorm


class Transform(nn.Module):
    """$\\mathrm{norm}(a(W x + b))$, before the output layer."""

    def __init__(self, dim: int, activation: Callable[[Tensor], Tensor], eps: float) -> None:
        super().__init__()
        self.linear, self.norm, self.activation = nn.Linear(dim, dim), nn.LayerNorm(dim, eps=eps), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.linear(x)))


class NoHead(nn.Module):
    """A stand-in for a head absent from the folder."""

    def forward(self, x: Tensor) -> Tensor:
        """Refuse to run.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError("this BERT came without a head for masked tokens: it answers encode(), not logits")


def bert(settings: Settings, weights: Weights) -> EncoderOnly:
    """A BERT encoder."""
    if settings.get("is_decoder", bool, False) or settings.get("add_cross_attention", bool, False):
        raise RunFolderError(f"{settings.source} is of a BERT that decodes; regard reads the encoder")
    weights.strip_prefix("bert.")
    # The oldest folders use TensorFlow's names for the gain and the offset of a norm.
    weights.rename(".gamma", ".weight")
    weights.rename(".beta", ".bias")
    weights.drop("embeddings.position_ids", "pooler.*", "cls.seq_relationship.*", "classifier.*", "qa_outputs.*")
    has_head = _move(settings, weights)
    dim, eps = settings.get("hidden_size", int), settings.get("layer_norm_eps", float, 1e-12)
    activation = settings.one_of("hidden_act", ACTIVATIONS, "gelu")
    dropout = settings.get("hidden_dropout_prob", float, 0.1)
    norm = partial(nn.LayerNorm, eps=eps)
    heads, attention_dropout = (
        settings.get("num_attention_heads", int),
        settings.get("attention_probs_dropout_prob", float, 0.1),
    )
    parts = OneStackParts(
        dim=dim,
        stack=StackParts(
            attention=[partial(MultiHeadAttention, dim, heads, dropout=attention_dropout)]
            * settings.get("num_hidden_layers", int),
            feed_forward=partial(FeedForward, dim, settings.get("intermediate_size", int), activation=activation),
            residual=partial(PostNorm, dim, dropout=dropout, norm=norm),
            positions=partial(LearnedPositions, settings.get("max_position_embeddings", int), dim),
            embedding_norm=partial(norm, dim),
        ),
        num_segments=settings.get("type_vocab_size", int, 2),
        embedding_scale=1.0,
        dropout=dropout,
        head=partial(Transform, dim, activation, eps) if has_head else NoHead,
        output_bias=has_head,
    )
    return weights.build(lambda: EncoderOnly(parts, vocab_size=settings.get("vocab_size", int)))


def _move(settings: Settings, weights: Weights) -> bool:
    weights.move("embeddings.word_embeddings", "embedding")
    weights.move("embeddings.position_embeddings", "positions")
    weights.move("embeddings.token_type_embeddings", "segments")
    weights.move("embeddings.LayerNorm", "embedding_norm")
    for number in range(settings.get("num_hidden_layers", int)):
        theirs, ours = f"encoder.layer.{number}", f"layers.{number}"
        names = ("self.query", "self.key", "self.value", "output.dense")
        weights.attention(f"{theirs}.attention", f"{ours}.self_attention", names)
        weights.move(f"{theirs}.attention.output.LayerNorm", f"{ours}.residuals.0.norm")
        weights.move(f"{theirs}.intermediate.dense", f"{ours}.feed_forward.up")
        weights.move(f"{theirs}.output.dense", f"{ours}.feed_forward.down")
        weights.move(f"{theirs}.output.LayerNorm", f"{ours}.residuals.1.norm")
    weights.ours["output.weight"] = weights.ours["embedding.weight"]
    if "cls.predictions.bias" not in weights:
        return False
    weights.move("cls.predictions.transform.dense", "head.linear")
    weights.move("cls.predictions.transform.LayerNorm", "head.norm")
    weights.ours["output.bias"] = weights.take_any("cls.predictions.bias", "cls.predictions.decoder.bias")
    tied = "cls.predictions.decoder.weight"
    if tied in weights and not torch.equal(weights.take(tied), weights.ours["embedding.weight"]):
        raise RunFolderError(f"{weights.source} has an output layer of its own ({tied}); regard reads a tied one")
    return True
