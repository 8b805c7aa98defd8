"""The settings of the models: their sizes and the names of their parts. They need no torch; flags are made of them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """The widths and parts of a stack of Transformer layers."""

    dim: int = 256
    """The width of the model; the paper's d_model."""
    num_heads: int = 4
    """The number of attention heads; the paper's h."""
    num_kv_heads: int | None = None
    """The number of key/value heads, which the query heads share; None means one for each query head."""
    feed_forward_dim: int = 1024
    """The hidden width of the feed-forward networks; the paper's d_ff."""
    activation: Literal["relu", "gelu", "swiglu"] = "relu"
    """The activation of the feed-forward networks; swiglu is gated."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm or RMSNorm."""
    norm_position: Literal["pre", "post"] = "pre"
    """The norm stands before each sublayer (easy to train) or after it (as in the paper)."""
    positions: Literal["sinusoidal", "learned", "rotary"] = "sinusoidal"
    """Positions that are added to the embeddings; rotary positions turn the queries and keys of self-attention."""
    max_length: int = 1024
    """The longest sequence in tokens, if positions are learned."""
    dropout: float = 0.1
    """The probability of dropping an entry of an embedding or of a sublayer's output."""
    activation_dropout: float | None = None
    """The probability of dropping a hidden unit of the feed-forward networks (the paper: 0); None means `dropout`."""
    attention_dropout: float = 0.0
    """The probability of dropping an attention weight; above 0 the fused kernels cannot run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig(StackConfig):
    """The sizes and parts of an encoder-decoder Transformer."""

    encoder_layers: int = 3
    """The number of layers in the encoder; the paper's N."""
    decoder_layers: int = 3
    """The number of layers in the decoder."""
    shared_embeddings: bool = False
    """Whether source and target embeddings share one matrix, which requires one vocabulary."""
    tied_output: bool = True
    """Whether the output layer shares the matrix of the target embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOnlyConfig(StackConfig):
    """The sizes and parts of a decoder-only Transformer."""

    num_layers: int = 4
    """The number of layers in the stack."""
    activation: Literal["relu", "gelu", "swiglu"] = "gelu"
    """Activation of the feed-forward networks; swiglu is gated."""
    positions: Literal["sinusoidal", "learned", "rotary"] = "rotary"
    """Positions that are added to the embeddings; rotary positions turn the queries and keys of self-attention."""
    tied_output: bool = True
    """The output layer is the embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOnlyConfig(StackConfig):
    """The sizes and parts of an encoder-only Transformer."""

    num_layers: int = 4
    """The number of layers in the stack."""
    activation: Literal["relu", "gelu", "swiglu"] = "gelu"
    """Activation of the feed-forward networks; swiglu is gated."""
    positions: Literal["sinusoidal", "learned", "rotary"] = "rotary"
    """Positions that are added to the embeddings; rotary positions turn the queries and keys of self-attention."""
    tied_output: bool = True
    """The output layer is the embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RNNConfig:
    """The sizes and parts of the recurrent model."""

    embedding_dim: int = 256
    """The width of the word vectors; Bahdanau's m."""
    hidden_dim: int = 256
    """The width of the decoder's state, and of the encoder's state in each direction; Bahdanau's n."""
    attention_dim: int = 256
    """The number of hidden units of the additive score; Bahdanau's n'."""
    decoder: Literal["bahdanau", "luong"] = "bahdanau"
    """Whether the decoder attends with the state before the step (Bahdanau) or after it (Luong)."""
    score: Literal["additive", "dot"] = "additive"
    """Additive score (Bahdanau), or the dot product with projected keys (Luong's general)."""
    input_feeding: bool = True
    """For Luong only: whether the last attentional vector is an input of the next step."""
    encoder_layers: int = 1
    """The number of layers of the bidirectional GRU encoder."""
    dropout: float = 0.2
    """The probability of dropping an entry of a word vector or of the readout."""
