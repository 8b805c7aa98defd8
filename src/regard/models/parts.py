"""What a Transformer is built from: makers of its parts, so that a variant is another maker and no flag."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from regard.nn import MultiHeadAttention, PostNorm, PreNorm

Maker = Callable[[], nn.Module]
"""Makes one module; called anew for each place in the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackParts:
    """The parts of an encoder or of a decoder."""

    num_layers: int
    """Layers of the stack."""
    attention: Callable[[], MultiHeadAttention]
    """Each self-attention, and in a decoder each attention to the source."""
    feed_forward: Maker
    """Each feed-forward network, (..., D) to (..., D)."""
    residual: Callable[[], PreNorm | PostNorm]
    """What stands around each of these: the skip connection and the norm."""
    positions: Maker
    """Adds positions to embeddings, (B, T, D) to (B, T, D), called with an `offset`."""
    relative: Maker | None = None
    """Answers, without arguments, the bias that the self-attention of every layer shares."""
    embedding_norm: Maker = nn.Identity
    """After the positions."""
    final_norm: Maker = nn.Identity
    """After the last layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerParts:
    """The parts of an encoder-decoder Transformer.

    `TransformerConfig` describes those that are trained here; the weights of other families bring their own.
    """

    dim: int
    """Width of the model; the paper's d_model."""
    encoder: StackParts
    decoder: StackParts
    embedding_scale: float | None = None
    """Embeddings are multiplied by it; None is the square root of `dim`."""
    dropout: float = 0.0
    """Probability of dropping an entry of the embeddings."""
    shared_embeddings: bool = False
    """One matrix for source and target embeddings."""
    tied_output: bool = True
    """The output layer is the target embedding."""
    output_bias: bool = False
    """A number for each token of the vocabulary is added to its logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStackParts:
    """The parts of a Transformer of one stack: decoder-only or encoder-only."""

    dim: int
    """Width of the model."""
    stack: StackParts
    num_segments: int = 0
    """Kinds of text with a learned vector each, which is added to the embeddings; 0 for none."""
    embedding_scale: float | None = None
    """Embeddings are multiplied by it; None is the square root of `dim`."""
    dropout: float = 0.0
    """Probability of dropping an entry of the embeddings."""
    head: Maker = nn.Identity
    """Between the last layer and the output layer, (..., D) to (..., D)."""
    tied_output: bool = True
    """The output layer is the embedding."""
    output_bias: bool = False
    """A number for each token of the vocabulary is added to its logits."""
