"""The settings of the models, without torch: sizes and names of parts, the source of the command line's flags.

The named sizes are each from a paper: widths, heads, layers and dropout, and parts where `StackConfig` has them; a
comment lists other properties of the original.
"""

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from regard.errors import ArgumentError, require
from regard.tensors.kinds import refuse_wrong_kinds
from regard.tensors.ranges import require_above, require_dropout, require_one_of, require_sizes

ACTIVATIONS, NORMS, NORM_POSITIONS = ("relu", "gelu", "swiglu"), ("layer", "rms"), ("pre", "post")
POSITIONS, GATES = ("sinusoidal", "learned", "rotary"), ("none", "head", "element")
"""The names of `StackConfig` and of `OneStackConfig`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    depths: ClassVar[tuple[str, ...]] = ()
    """The fields that count layers."""

    dim: int = 256
    """The width of the model; the paper's d_model."""
    num_heads: int = 4
    """The number of attention heads; the paper's h."""
    num_kv_heads: int | None = None
    """The key/value heads, shared by the query heads; by default one for each query head."""
    feed_forward_dim: int = 1024
    """The hidden width of the feed-forward networks; the paper's d_ff."""
    activation: Literal["relu", "gelu", "swiglu"] = "relu"
    """The activation of the feed-forward networks; swiglu is gated."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm or RMSNorm."""
    norm_position: Literal["pre", "post"] = "pre"
    """The norm before each sublayer (easy to train) or after it (as in the paper)."""
    positions: Literal["sinusoidal", "learned", "rotary"] = "sinusoidal"
    """Positions added to the embeddings; rotary positions rotate the queries and keys of self-attention."""
    max_length: int = 1024
    """The longest sequence in tokens, if positions are learned."""
    embedding_gain: float = 1.0
    """Embeddings begin smaller than in the paper by this factor, and their scale is larger: above 1 they learn
    faster.
    """
    dropout: float = 0.1
    """The probability of dropping an entry of an embedding or of a sublayer's output."""
    activation_dropout: float | None = None
    """The probability of dropping a hidden unit of the feed-forward networks (the paper: 0); by default `dropout`."""
    attention_dropout: float = 0.0
    """The probability of dropping an attention weight; above 0 the fused kernels cannot run."""

    def __post_init__(self) -> None:
        require_one_of("activation", self.activation, ACTIVATIONS)
        require_one_of("norm", self.norm, NORMS)
        require_one_of("norm_position", self.norm_position, NORM_POSITIONS)
        require_one_of("positions", self.positions, POSITIONS)
        num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        require_sizes(
            dim=self.dim,
            num_heads=self.num_heads,
            num_kv_heads=num_kv_heads,
            feed_forward_dim=self.feed_forward_dim,
            max_length=self.max_length,
        )
        require_above(0, embedding_gain=self.embedding_gain)
        require_dropout(dropout=self.dropout, attention_dropout=self.attention_dropout)
        if self.activation_dropout is not None:
            require_dropout(activation_dropout=self.activation_dropout)
        if self.dim % self.num_heads:
            raise ArgumentError(f"dim must be a multiple of num_heads, got {self.dim} and {self.num_heads}")
        if self.num_heads % num_kv_heads:
            raise ArgumentError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {num_kv_heads}"
            )
        if self.positions == "rotary" and self.dim // self.num_heads % 2:
            raise ArgumentError(
                f"rotary positions turn pairs of dimensions: dim / num_heads must be even, got {self.dim} / "
                f"{self.num_heads}"
            )


@refuse_wrong_kinds
@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig(StackConfig):
    """The sizes and parts of an encoder-decoder Transformer."""

    depths: ClassVar[tuple[str, ...]] = ("encoder_layers", "decoder_layers")
    encoder_layers: int = 3
    """The number of layers in the encoder; the paper's N."""
    decoder_layers: int = 3
    """The number of layers in the decoder."""
    shared_embeddings: bool = False
    """Whether source and target embeddings share one matrix, which requires one vocabulary."""
    tied_output: bool = True
    """Whether the output layer shares the matrix of the target embedding."""

    def __post_init__(self) -> None:
        # super() fails here: `dataclass` replaces a class with slots by a new one, and super() refers to the old one.
        StackConfig.__post_init__(self)
        require_sizes(encoder_layers=self.encoder_layers, decoder_layers=self.decoder_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStackConfig(StackConfig):
    depths: ClassVar[tuple[str, ...]] = ("num_layers",)
    num_layers: int = 4
    """The number of layers in the stack."""
    activation: Literal["relu", "gelu", "swiglu"] = "gelu"
    """Activation of the feed-forward networks; swiglu is gated."""
    positions: Literal["sinusoidal", "learned", "rotary"] = "rotary"
    """Positions added to the embeddings; rotary positions rotate the queries and keys of self-attention."""
    tied_output: bool = True
    """The output layer is the embedding."""
    layers: str = "full"
    """The kinds of the layers, a pattern that repeats: "5 sliding, 1 full" (Gemma 3, arXiv:2503.19786), or with linear
    attention "3 gated_delta, 1 full" (Qwen3-Next); its kinds are gated_delta, mamba2 and lightning.
    """
    window: int | None = None
    """The keys that a sliding layer attends to, the query's own included; in an encoder, on both sides of it."""
    rotary_fraction: float = 1.0
    """The part of each head that rotary positions rotate, above 0, at most 1 (GPT-NeoX: 0.25, arXiv:2204.06745)."""
    no_positions_every: int | None = None
    """Every n-th layer has no rotary positions (SmolLM3: 4; Yang et al. 2025, arXiv:2501.18795)."""
    qk_norm: bool = False
    """An RMSNorm of the queries and keys of each head (Qwen3, arXiv:2505.09388)."""
    gate: Literal["none", "head", "element"] = "none"
    """A learned gate for each head's output, or for each of its elements (Qiu et al. 2025, arXiv:2505.06708)."""
    sink: bool = False
    """Each head learns the score of one more key, with value 0 (GPT-OSS, arXiv:2508.10925)."""

    def __post_init__(self) -> None:
        StackConfig.__post_init__(self)
        require_sizes(num_layers=self.num_layers)
        require_one_of("gate", self.gate, GATES)
        is_sliding = "sliding" in read_layers(self.layers)
        if is_sliding != (self.window is not None):
            raise ArgumentError(
                f"a window is for sliding layers, got layers={self.layers!r} and window={self.window}: "
                + ("give --model.window" if is_sliding else 'write layers="3 sliding, 1 full", or leave the window out')
            )
        if self.window is not None:
            require_sizes(window=self.window)
        if self.no_positions_every is not None:
            require_sizes(no_positions_every=self.no_positions_every)
        if self.positions != "rotary" and (self.rotary_fraction != 1.0 or self.no_positions_every is not None):
            raise ArgumentError(
                f"rotary_fraction and no_positions_every are for rotary positions, got positions={self.positions!r}"
            )
        turned = int(self.dim // self.num_heads * self.rotary_fraction) if 0 < self.rotary_fraction <= 1 else 0
        if self.positions == "rotary" and (turned < 2 or turned % 2):
            raise ArgumentError(
                f"rotary_fraction must be above 0 and at most 1, and turn an even number of the "
                f"{self.dim // self.num_heads} dimensions of a head; got {self.rotary_fraction}"
            )


@refuse_wrong_kinds
@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOnlyConfig(OneStackConfig):
    """The sizes and parts of a decoder-only Transformer."""


@refuse_wrong_kinds
@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOnlyConfig(OneStackConfig):
    """The sizes and parts of an encoder-only Transformer."""

    def __post_init__(self) -> None:
        OneStackConfig.__post_init__(self)
        if recurrent := [kind for kind in read_layers(self.layers) if kind in RECURRENT]:
            raise ArgumentError(
                f"{recurrent[0]} layers read from left to right, and an encoder reads both ways; got {self.layers!r}"
            )
        if self.window is not None and self.window % 2 == 0:
            raise ArgumentError(
                f"the window of an encoder has the query in its middle: it must be odd, got {self.window}"
            )


@refuse_wrong_kinds
@dataclass(frozen=True, slots=True, kw_only=True)
class RNNConfig:
    """The sizes and parts of the recurrent model."""

    depths: ClassVar[tuple[str, ...]] = ("encoder_layers",)

    embedding_dim: int = 256
    """The width of the word vectors; Bahdanau's m."""
    hidden_dim: int = 256
    """The width of the decoder's state, and of the encoder's state in each direction; Bahdanau's n."""
    attention_dim: int = 256
    """The hidden units of the additive score; Bahdanau's n'."""
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

    def __post_init__(self) -> None:
        require_one_of("decoder", self.decoder, ("bahdanau", "luong"))
        require_one_of("score", self.score, ("additive", "dot"))
        require_sizes(
            embedding_dim=self.embedding_dim,
            hidden_dim=self.hidden_dim,
            attention_dim=self.attention_dim,
            encoder_layers=self.encoder_layers,
        )
        require_dropout(dropout=self.dropout)


ModelConfig = StackConfig | RNNConfig


RECURRENT = ("gated_delta", "mamba2", "lightning")
"""Linear attention, which reads from left to right: a gated delta net, Mamba-2, lightning attention."""
KINDS = ("full", "sliding", *RECURRENT)
"""Self-attention to every key that the mask allows, or to those in the window; and linear attention."""


def read_layers(pattern: str) -> tuple[str, ...]:
    """The kinds of a pattern's layers. Layer n of a stack has kind n modulo their number.

    Args:
        pattern: kinds separated by commas, each perhaps after a number of layers.

    >>> read_layers("2 sliding, full")
    ('sliding', 'sliding', 'full')
    """
    require(pattern, str, "layers", 'the kinds of layers, like "5 sliding, 1 full" (their number is num_layers)')
    kinds: list[str] = []
    for part in pattern.split(","):
        read = re.fullmatch(r"\s*(?:([1-9][0-9]{0,3})\s+)?(\w+)\s*", part)
        if read is None or read[2] not in KINDS:
            raise ArgumentError(
                f'layers are written like "5 sliding, 1 full", with the kinds {", ".join(KINDS)}; got {pattern!r}'
            )
        kinds += [read[2]] * int(read[1] or 1)
    return tuple(kinds)


Size = Literal["tiny", "small", "base"]

TRANSFORMER_SIZES = MappingProxyType[Size, TransformerConfig](
    {
        # Wu et al. 2021 (arXiv:2105.14462), the Transformer-Tiny and -Small for 29,000 pairs of sentences.
        "tiny": TransformerConfig(
            dim=128, num_heads=4, encoder_layers=4, decoder_layers=4, feed_forward_dim=256, dropout=0.3
        ),
        "small": TransformerConfig(
            dim=512, num_heads=4, encoder_layers=6, decoder_layers=6, feed_forward_dim=1024, dropout=0.3
        ),
        # Vaswani et al. 2017 (arXiv:1706.03762), table 3, "base".
        "base": TransformerConfig(
            dim=512,
            num_heads=8,
            encoder_layers=6,
            decoder_layers=6,
            feed_forward_dim=2048,
            norm_position="post",
            dropout=0.1,
        ),
    }
)
DECODER_ONLY_SIZES = MappingProxyType[Size, DecoderOnlyConfig](
    {
        # Eldan and Li 2023 (arXiv:2305.07759), the released TinyStories-8M: a GPT-Neo of width 256, with a window of
        # 256 tokens in every second layer.
        "tiny": DecoderOnlyConfig(
            dim=256, num_heads=16, num_layers=8, feed_forward_dim=1024, positions="learned", dropout=0.0
        ),
        # Biderman et al. 2023 (arXiv:2304.01373), table 1, Pythia-70M: its layers run attention and feed-forward
        # network in parallel, and rotary positions rotate a quarter of each head.
        "small": DecoderOnlyConfig(
            dim=512, num_heads=8, num_layers=6, feed_forward_dim=2048, tied_output=False, dropout=0.0
        ),
        # Radford et al. 2019, "Language models are unsupervised multitask learners", table 2, the smallest.
        "base": DecoderOnlyConfig(
            dim=768, num_heads=12, num_layers=12, feed_forward_dim=3072, positions="learned", dropout=0.1
        ),
    }
)
