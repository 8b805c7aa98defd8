"""BERT (Devlin et al. 2019, arXiv:1810.04805) and RoBERTa (Liu et al. 2019, arXiv:1907.11692): the encoder, and the
head for masked tokens if there is one.

They are post-norm with learned positions and segments, and their embeddings are normalised. The pooler and the other
heads are left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from regard.errors import ArgumentError, RunFolderError
from regard.models.convert.activations import ACTIVATIONS
from regard.models.convert.folder import TIED, Settings
from regard.models.convert.weights import Weights
from regard.models.encoder_only import EncoderOnly
from regard.models.parts import OneStackParts, StackParts
from regard.nn import FeedForward, LearnedPositions, MultiHeadAttention, PostNorm


class Transform(nn.Module):
    """$\\mathrm{norm}(a(W x + b))$, before the output layer."""

    def __init__(self, dim: int, activation: Callable[[Tensor], Tensor], norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.linear, self.norm, self.activation = nn.Linear(dim, dim), norm(dim), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.linear(x)))


class NoHead(nn.Module):
    """A stand-in for a head absent from the folder."""

    def forward(self, x: Tensor) -> Tensor:
        """Refuse to run."""
        raise ArgumentError("this model came without a head: it answers encode(), not logits")


@dataclass(frozen=True, slots=True)
class BertNames:
    """The names in which BERT and RoBERTa differ."""

    base: str
    head: str
    dense: str
    norm: str
    first_position: Callable[[Settings], int]
    """The row of the table that belongs to the first token."""


BERT = BertNames("bert.", "cls.predictions", "transform.dense", "transform.LayerNorm", lambda settings: 0)
ROBERTA = BertNames(
    "roberta.", "lm_head", "dense", "layer_norm", lambda settings: settings.get("pad_token_id", int, 1) + 1
)


def bert(names: BertNames, settings: Settings, weights: Weights) -> EncoderOnly:
    """A BERT or RoBERTa encoder."""
    if settings.get("is_decoder", bool, False) or settings.get("add_cross_attention", bool, False):
        raise RunFolderError(f"{settings.source} is of a BERT that decodes; regard reads the encoder")
    weights.strip_prefix(names.base)
    # The oldest folders use TensorFlow's names for the gain and the offset of a norm.
    weights.rename(".gamma", ".weight")
    weights.rename(".beta", ".bias")
    weights.drop(
        "embeddings.position_ids",
        "pooler.*",
        "cls.seq_relationship.*",
        "classifier.*",
        "qa_outputs.*",
        "embeddings.token_type_ids",
    )
    has_head, tied = _move(names, settings, weights)
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
            feed_forward=[partial(FeedForward, dim, settings.get("intermediate_size", int), activation=activation)]
            * settings.get("num_hidden_layers", int),
            residual=partial(PostNorm, dim, dropout=dropout, norm=norm),
            positions=partial(LearnedPositions, len(weights.ours["positions.weight"]), dim),
            embedding_norm=partial(norm, dim),
        ),
        num_segments=settings.get("type_vocab_size", int, 2),
        embedding_scale=1.0,
        dropout=dropout,
        head=partial(Transform, dim, activation, norm) if has_head else NoHead,
        tied_output=tied,
        output_bias=has_head,
    )
    return weights.build(lambda: EncoderOnly(parts, vocab_size=settings.get("vocab_size", int)))


def _move(names: BertNames, settings: Settings, weights: Weights) -> tuple[bool, bool]:
    head = _move_head(settings, weights, (names.head, names.dense, names.norm), "embeddings.word_embeddings.weight")
    table = weights.take("embeddings.position_embeddings.weight")
    if len(table) != settings.get("max_position_embeddings", int):
        raise RunFolderError(f"{weights.source} does not fit its config.json: it has {len(table)} positions")
    weights.ours["positions.weight"] = table[names.first_position(settings) :]
    weights.move("embeddings.token_type_embeddings", "segments")
    weights.move("embeddings.LayerNorm", "embedding_norm")
    for number in range(settings.get("num_hidden_layers", int)):
        projections = ("self.query", "self.key", "self.value", "output.dense")
        weights.attention(f"encoder.layer.{number}.attention", f"layers.{number}.self_attention", projections)
        _move_around_attention(weights, number)
    return head


def _move_around_attention(weights: Weights, number: int) -> None:
    """Move the feed-forward network and the norms of a layer."""
    theirs, ours = f"encoder.layer.{number}", f"layers.{number}"
    weights.move(f"{theirs}.attention.output.LayerNorm", f"{ours}.residuals.0.norm")
    weights.move(f"{theirs}.intermediate.dense", f"{ours}.feed_forward.up")
    weights.move(f"{theirs}.output.dense", f"{ours}.feed_forward.down")
    weights.move(f"{theirs}.output.LayerNorm", f"{ours}.residuals.1.norm")


def _move_head(settings: Settings, weights: Weights, names: tuple[str, str, str], embedding: str) -> tuple[bool, bool]:
    """Move the embedding, the output layer, and the head for masked tokens before it. Returns whether there is a head,
    and whether the output layer is the embedding."""
    head, dense, norm = names
    if not weights.has(f"{head}.*"):
        return False, weights.tables("embedding", embedding, tied=True)
    tied = weights.tables("embedding", embedding, tied=settings.get(TIED, bool, True), head=f"{head}.decoder.weight")
    weights.move(f"{head}.{dense}", "head.linear")
    weights.move(f"{head}.{norm}", "head.norm")
    weights.ours["output.bias"] = weights.take_any(f"{head}.decoder.bias", f"{head}.bias")
    weights.drop(f"{head}.bias")  # it is not read beside the other
    return True, tied
