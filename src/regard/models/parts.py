"""The makers of a Transformer's parts: a variant of the model is another maker, not a flag."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from regard.nn import LatentAttention, MultiHeadAttention
from regard.nn.recurrent_mixers import RecurrentMixer
from regard.nn.residual import Residual

Maker = Callable[[], nn.Module]
"""A function that makes one module, called once for each place in the model."""
MakeAttention = Callable[[], MultiHeadAttention | LatentAttention | RecurrentMixer]
"""A function that makes the attention of one layer, or its linear attention. Attention to a source needs the multi-head
one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackParts:
    attention: Sequence[MakeAttention]
    """For each layer, makes its self-attention and, in a decoder, its attention to the source."""
    feed_forward: Sequence[Maker]
    """For each layer, makes its feed-forward network, (..., D) to (..., D)."""
    residual: Callable[[], Residual]
    """Makes the skip connection and the norm around each of these."""
    positions: Maker
    """Makes the module of positions, (B, T, D) to (B, T, D) with an `offset`."""
    relative: Maker | None = None
    """Makes the module of the self-attention bias shared by every layer, called without arguments."""
    embedding_norm: Maker = nn.Identity
    """Makes the norm after the positions are added."""
    final_norm: Maker = nn.Identity
    """Makes the norm after the last layer."""

    @property
    def num_layers(self) -> int:
        return len(self.attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerParts:
    """The parts of an encoder-decoder Transformer.

    `TransformerConfig` describes the parts of models trained here.
    """

    dim: int
    """Width of the model; the paper's d_model."""
    source: Maker | None = None
    """Makes the module from sources to vectors (B, S, D), such as `Patches`; by default tokens are embedded."""
    encoder: StackParts
    decoder: StackParts
    embedding_gain: float = 1.0
    """The factor by which embeddings begin smaller than 1 / sqrt(dim), and are scaled above sqrt(dim)."""
    dropout: float = 0.0
    """Probability of dropping an entry of the embeddings."""
    shared_embeddings: bool = False
    tied_output: bool = True
    """Whether the output layer shares the matrix of the target embedding."""
    output_bias: bool = False
    """Whether the logits have a learned bias for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStackParts:
    """The parts of a Transformer of one stack: decoder-only or encoder-only."""

    dim: int
    inputs: Maker | None = None
    """Makes the module from inputs to vectors (B, T, D), such as `Patches`; by default tokens are embedded."""
    stack: StackParts
    embedding_gain: float = 1.0
    """The factor by which embeddings begin smaller than 1 / sqrt(dim), and are scaled above sqrt(dim)."""
    dropout: float = 0.0
    head: Maker = nn.Identity
    """Makes the module between the last layer and the output layer, (..., D) to (..., D)."""
    tied_output: bool = True
    output_bias: bool = False
    """Whether the logits have a learned bias for each token."""
