"""The encoder-decoder Transformer of Vaswani et al. 2017 (arXiv:1706.03762)."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor, nn

from regard.call.masks.base import Mask
from regard.call.masks.basic import causal, lengths
from regard.errors import ArgumentError, require
from regard.maps.attention_map import AttentionMap
from regard.models.config import TransformerConfig
from regard.models.protocol import OutputLoss, RecordMap, Step
from regard.models.stack import (
    SelfAttentionLayer,
    StackParts,
    TransformerParts,
    attention_of,
    make_stack,
    padding_mask,
    recorded_attention,
)
from regard.nn import KeyValue, MultiHeadAttention, TokenEmbedding
from regard.nn.cache import Past


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder's output, then a feed-forward network."""

    def __init__(self, parts: StackParts, number: int) -> None:
        super().__init__()
        self.self_attention: Any = parts.attention[number]()
        cross = parts.attention[number]()
        require(cross, MultiHeadAttention, "the attention of a decoder with a source", "a MultiHeadAttention")
        self.cross_attention = cast(MultiHeadAttention, cross)
        self.feed_forward = parts.feed_forward[number]()
        self.residuals = nn.ModuleList([parts.residual() for _ in range(3)])

    def forward(
        self,
        x: Tensor,
        memory: Tensor | KeyValue,
        mask: Mask | None,
        record: RecordMap | None,
        name: str,
        past: Past | None = None,
    ) -> Tensor:
        """(B, T, D) to (B, T, D); `mask` excludes the padding of the memory.

        In a search T is 1, `past` has the earlier positions, and `memory` is projected. The sequences of a source,
        side by side, are then the queries of one call; `record` gets the map of this call alone.
        """
        around_itself, around_source, around_network = self.residuals
        own = record if past is None else None

        def look_across(y: Tensor) -> Tensor:
            if not isinstance(memory, KeyValue):
                return recorded_attention(self.cross_attention, record, f"{name}.cross", y, memory, mask=mask)
            by_source = y.reshape(memory.key_buffer.shape[0], -1, y.shape[-1])
            recorded = None if record is None else partial(record, f"{name}.cross")
            seen: Tensor = self.cross_attention(by_source, memory, mask=mask, record=recorded)
            return seen.view_as(y)

        x = around_itself(
            x,
            lambda y: recorded_attention(self.self_attention, own, f"{name}.self", y, mask=causal(), past=past),
        )
        return cast(Tensor, around_network(around_source(x, look_across), self.feed_forward))


class SharedAlignment:
    """The attention of one step to A sources of K sequences each, by sequence: (A * K, H, 1, S)."""

    def __init__(self, weights: AttentionMap) -> None:
        self._weights = weights

    def dense(self) -> Float[Tensor, "N H 1 S"]:
        return self._weights.dense().transpose(1, 2).flatten(0, 1).unsqueeze(2)


@dataclass(frozen=True, slots=True, eq=False)
class TransformerState:
    """The decoding state; N sequences are the first dimension."""

    caches: tuple[KeyValue | None, ...]
    """Keys and values of the target so far, one entry per layer."""
    memory: tuple[KeyValue, ...]
    """Keys and values of A sources, one entry per layer."""
    source_lengths: Integer[Tensor, " A"] | None
    """None without padded sources."""
    sources: Integer[Tensor, " N"]
    """The source of each sequence, from 0 to A - 1. The sequences of a source are adjacent, N / A of each."""
    position: int


class Transformer(nn.Module):
    """An encoder and a decoder built on attention alone.

    Args:
        config: sizes and names of parts, or the parts themselves.
        source_vocab_size: number of source tokens; unused where the parts have a `source` of their own.
        target_vocab_size: number of target tokens, V.

    Raises:
        ArgumentError: a part does not exist, or the sizes do not fit each other.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3 and figure 1, with norm_position="post" and
    shared_embeddings. Norms before the sublayers are from Xiong et al. 2020 (arXiv:2002.04745).

    >>> import torch
    >>> model = Transformer(TransformerConfig(dim=8, num_heads=2), source_vocab_size=11, target_vocab_size=13)
    >>> source, lengths = torch.randint(4, 11, (2, 5)), torch.tensor([5, 3])
    >>> model(source, lengths, torch.randint(4, 13, (2, 7))).shape
    torch.Size([2, 7, 13])
    >>> {name: tuple(m.shape) for name, m in model.attend(source, lengths, source[:, :4]).items()}["decoder.2.cross"]
    (2, 2, 4, 5)
    """

    def __init__(
        self, config: TransformerConfig | TransformerParts, *, source_vocab_size: int, target_vocab_size: int
    ) -> None:
        super().__init__()
        require(config, (TransformerConfig, TransformerParts), "config", "a TransformerConfig")
        parts = _parts(config) if isinstance(config, TransformerConfig) else config
        if parts.shared_embeddings and source_vocab_size != target_vocab_size:
            raise ArgumentError(
                f"shared embeddings need one vocabulary, got sizes {source_vocab_size} and {target_vocab_size}"
            )
        self.config = config
        embedding = partial(TokenEmbedding, dim=parts.dim, gain=parts.embedding_gain)
        self.target_embedding = embedding(target_vocab_size)
        own = parts.source or partial(embedding, source_vocab_size)
        self.source_embedding: Any = self.target_embedding if parts.shared_embeddings else own()
        self.source_positions, self.target_positions = parts.encoder.positions(), parts.decoder.positions()
        self.max_length: int | None = cast(Any, self.source_positions).max_length
        self.dropout = nn.Dropout(parts.dropout)
        self.encoder = nn.ModuleList(
            SelfAttentionLayer(parts.encoder, number) for number in range(parts.encoder.num_layers)
        )
        self.decoder = nn.ModuleList(DecoderLayer(parts.decoder, number) for number in range(parts.decoder.num_layers))
        self.encoder_norm, self.decoder_norm = parts.encoder.final_norm(), parts.decoder.final_norm()
        self.output = nn.Linear(parts.dim, target_vocab_size, bias=False)
        nn.init.normal_(self.output.weight, std=parts.dim**-0.5)
        if parts.tied_output:
            self.output.weight = self.target_embedding.weight

    def forward(
        self,
        source: Shaped[Tensor, "B ..."],
        source_lengths: Integer[Tensor, " B"],
        target_input: Integer[Tensor, "B T"],
        *,
        loss: OutputLoss | None = None,
    ) -> Float[Tensor, "B T V"] | tuple[Tensor, Tensor]:
        """Logits of each next target token (teacher forcing); with `loss`, the result of `loss`.

        Args:
            source: token ids (B, S), or the input of the parts' `source`. Padding is never attended to.
            source_lengths: the number of source tokens in each sequence, at most S.
            target_input: the target shifted right; it starts with the begin token.
            loss: called instead of the output layer, with the input of that layer and the layer.

        Raises:
            ArgumentError: a sequence is longer than the learned positions.
            ShapeError: the batch of targets differs from that of the sources.
        """
        x = self._decoded(target_input, self.encode(source, source_lengths), source_lengths)
        return self.output(x) if loss is None else loss(x, self.output)

    def encode(
        self,
        source: Shaped[Tensor, "B ..."],
        source_lengths: Integer[Tensor, " B"],
        record: RecordMap | None = None,
    ) -> Float[Tensor, "B S D"]:
        """The encoder's output."""
        x = self.dropout(self.source_positions(self.source_embedding(source)))
        mask = padding_mask(source_lengths, x, record)
        for number, layer in enumerate(self.encoder):
            x = layer(x, mask, record, f"encoder.{number}")
        return self.encoder_norm(x)

    def decode(
        self,
        target_input: Integer[Tensor, "B T"],
        memory: Float[Tensor, "B S D"],
        source_lengths: Integer[Tensor, " B"],
        record: RecordMap | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits of each next target token, given the encoder's output."""
        return self.output(self._decoded(target_input, memory, source_lengths, record))

    def _decoded(
        self, target_input: Tensor, memory: Tensor, source_lengths: Tensor, record: RecordMap | None = None
    ) -> Tensor:
        x = self.dropout(self.target_positions(self.target_embedding(target_input)))
        mask = padding_mask(source_lengths, memory, record)
        for number, layer in enumerate(self.decoder):
            x = layer(x, memory, mask, record, f"decoder.{number}")
        return self.decoder_norm(x)

    def attend(self, source: Tensor, source_lengths: Tensor, target_input: Tensor) -> dict[str, AttentionMap]:
        """Every attention map of a teacher-forced pass: encoder.n, decoder.n.self and decoder.n.cross."""
        maps: dict[str, AttentionMap] = {}
        memory = self.encode(source, source_lengths, maps.__setitem__)
        self.decode(target_input, memory, source_lengths, maps.__setitem__)
        return maps

    @property
    def alignment_names(self) -> list[str]:
        """The names of the decoder's attention to the source, first layer first."""
        return [f"decoder.{number}.cross" for number in range(len(self.decoder))]

    @property
    def source_names(self) -> list[str]:
        """The names of the encoder's attention."""
        return [f"encoder.{number}" for number in range(len(self.encoder))]

    def start(self, source: Shaped[Tensor, "B ..."], source_lengths: Integer[Tensor, " B"]) -> TransformerState:
        """Encode the source, and project its keys and values once for each decoder layer."""
        encoded = self.encode(source, source_lengths)
        memory = tuple(cast(DecoderLayer, layer).cross_attention.project(encoded) for layer in self.decoder)
        sources = torch.arange(len(source), device=source.device)
        padded = None if padding_mask(source_lengths, encoded) is None else source_lengths.long()
        return TransformerState((None,) * len(memory), memory, padded, sources, 0)

    def step(self, state: TransformerState, ids: Integer[Tensor, " N"]) -> Step:
        """Logits after one more token; the alignment is the last layer's.

        Without recorded gradients, the caches are written in place: the given state must not be used again.
        """
        x = self.dropout(self.target_positions(self.target_embedding(ids[:, None]), offset=state.position))
        mask = None if state.source_lengths is None else lengths(state.source_lengths)
        last = len(state.memory) - 1
        caches, weights = list[KeyValue](), dict[str, AttentionMap]()
        parts = zip(self.decoder, state.caches, state.memory, strict=True)
        for number, (layer, cache, memory) in enumerate(parts):
            past = Past(cache)
            x = layer(x, memory, mask, weights.__setitem__ if number == last else None, "", past)
            caches.append(past.cache)
        logits = self.output(self.decoder_norm(x))[:, 0]
        (seen,) = weights.values()
        alignment = seen if seen.shape[0] == len(ids) else SharedAlignment(seen)
        return Step(logits, alignment, replace(state, caches=tuple(caches), position=state.position + 1))

    def reorder(self, state: TransformerState, index: Integer[Tensor, " N"]) -> TransformerState:
        """The state of the sequences `index`. For unchanged sources, no memory is copied."""
        index = index.long()  # An index of uint8 would be a mask.
        caches = tuple(None if cache is None else cache.reorder(index) for cache in state.caches)
        sources = state.sources[index]
        if torch.equal(sources, state.sources):
            return replace(state, caches=caches)
        kept, counts = sources.unique_consecutive(return_counts=True)
        # Sources with unequal numbers of sequences are repeated: each sequence gets its own memory.
        each = int(counts[0]) if len(kept) and bool((counts == counts[0]).all()) else 1
        rows = sources[::each]
        mine = torch.arange(len(rows), device=rows.device)
        memory, valid = state.memory, state.source_lengths
        if len(rows) != memory[0].key_buffer.shape[0] or not torch.equal(rows, mine):
            memory = tuple(kv.reorder(rows) for kv in memory)
            valid = None if valid is None else valid[rows]
        return TransformerState(caches, memory, valid, mine.repeat_interleave(each), state.position)


def _parts(config: TransformerConfig) -> TransformerParts:
    return TransformerParts(
        dim=config.dim,
        encoder=make_stack(config, [attention_of(config)] * config.encoder_layers),
        decoder=make_stack(config, [attention_of(config)] * config.decoder_layers, sublayers=3),
        embedding_gain=config.embedding_gain,
        dropout=config.dropout,
        shared_embeddings=config.shared_embeddings,
        tied_output=config.tied_output,
    )
