"""Transformers of one stack from token ids to logits: the decoder-only one predicts each token from those before it
(Radford et al. 2018), the encoder-only one from those on both sides (Devlin et al. 2018).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor, nn

from regard.call.masks.base import Mask
from regard.call.masks.basic import causal, lengths, padding
from regard.call.masks.patterns import window
from regard.call.rotary.rotary import Rotary
from regard.errors import ArgumentError, require
from regard.maps.attention_map import AttentionMap
from regard.models.config import DecoderOnlyConfig, EncoderOnlyConfig, OneStackConfig, read_layers
from regard.models.protocol import OutputLoss, RecordMap, Step
from regard.models.stack import (
    NORMS,
    MakeAttention,
    Maker,
    OneStackParts,
    SelfAttentionLayer,
    attention_of,
    make_stack,
    padding_mask,
)
from regard.nn import GatedDeltaNet, LightningAttention, Mamba2, TokenEmbedding
from regard.nn.cache import MixerCache
from regard.nn.recurrent_mixers import RecurrentMixer
from regard.tensors.ranges import require_sizes


class OneStack(nn.Module):
    """Embedding, layers of self-attention, output layer. The two subclasses define the mask."""

    def __init__(self, parts: OneStackParts, vocab_size: int) -> None:
        super().__init__()
        require(parts, OneStackParts, "config", "a configuration of this model")
        require_sizes(vocab_size=vocab_size, num_layers=parts.stack.num_layers)
        embedding = partial(TokenEmbedding, vocab_size, parts.dim, gain=parts.embedding_gain)
        self.embedding = cast(Any, (parts.inputs or embedding)())
        self.positions = parts.stack.positions()
        self.max_length: int | None = cast(Any, self.positions).max_length
        self.dropout = nn.Dropout(parts.dropout)
        self.layers = nn.ModuleList(SelfAttentionLayer(parts.stack, number) for number in range(parts.stack.num_layers))
        self.final_norm = parts.stack.final_norm()
        self.head = parts.head()
        self.output = nn.Linear(parts.dim, vocab_size, bias=parts.output_bias)
        nn.init.normal_(self.output.weight, std=parts.dim**-0.5)
        if parts.output_bias:
            nn.init.zeros_(self.output.bias)
        if parts.tied_output:
            self.output.weight = self.embedding.weight

    def embed(self, inputs: Shaped[Tensor, "B ..."], offset: int | Tensor = 0) -> Float[Tensor, "B T D"]:
        """The input of the first layer."""
        return self.dropout(self.positions(self.embedding(inputs), offset=offset))

    def read_out(self, x: Float[Tensor, "B T D"], loss: OutputLoss | None = None) -> Any:
        """Logits (B, T, V) from the output of the last layer; with `loss`, the result of `loss`."""
        x = self.head(self.final_norm(x))
        return self.output(x) if loss is None else loss(x, self.output)

    def run(
        self,
        x: Float[Tensor, "B T D"],
        mask: Mask | None,
        record: RecordMap | None,
        name: str,
    ) -> Float[Tensor, "B T D"]:
        """The output of the last layer, from `embed`'s. The maps of the pass are named `name`.n."""
        for number, layer in enumerate(self.layers):
            x = layer(x, mask, record, f"{name}.{number}")
        return x

    def each_layer(self) -> Iterator[SelfAttentionLayer]:
        """The layers, from first to last."""
        return (cast(SelfAttentionLayer, layer) for layer in self.layers)


WindowSide = Literal["left", "both"]
"""The keys of a window: before the query in a decoder, around it in an encoder."""


def one_stack_parts(
    config: OneStackConfig, side: WindowSide, *, head: Maker = nn.Identity, output_bias: bool = False
) -> OneStackParts:
    return OneStackParts(
        dim=config.dim,
        stack=make_stack(config, [_attention(config, side, number) for number in range(config.num_layers)]),
        embedding_gain=config.embedding_gain,
        dropout=config.dropout,
        head=head,
        tied_output=config.tied_output,
        output_bias=output_bias,
    )


RECURRENT_LAYERS: dict[str, Callable[[OneStackConfig, int], MakeAttention]] = {
    "gated_delta": lambda config, number: partial(GatedDeltaNet, config.dim, config.num_heads),
    "mamba2": lambda config, number: partial(Mamba2, config.dim, config.num_heads),
    "lightning": lambda config, number: partial(
        LightningAttention, config.dim, config.num_heads, layer=number, num_layers=config.num_layers
    ),
}


def _attention(config: OneStackConfig, side: WindowSide, number: int) -> MakeAttention:
    kinds = read_layers(config.layers)
    if (recurrent := RECURRENT_LAYERS.get(kinds[number % len(kinds)])) is not None:
        return recurrent(config, number)
    parts: dict[str, Any] = {"sink": config.sink, "gate": None if config.gate == "none" else config.gate}
    if config.qk_norm:
        parts["qk_norm"] = partial(nn.RMSNorm, eps=1e-6)
    if kinds[number % len(kinds)] == "sliding" and config.window is not None:
        parts["window"] = window(config.window, side=side)
    if config.positions == "rotary":
        is_without = config.no_positions_every is not None and (number + 1) % config.no_positions_every == 0
        head_dim = config.dim // config.num_heads
        parts["rotary"] = None if is_without else Rotary(head_dim, fraction=config.rotary_fraction)
    return attention_of(config, **parts)


class EncoderOnly(OneStack):
    """A stack of layers with self-attention in both directions, trained to fill in masked tokens.

    Args:
        config: sizes and names of parts, or the parts themselves.
        vocab_size: number of tokens, V, including the mask token.

    Raises:
        ArgumentError: a part does not exist, or the sizes do not fit each other.

    Source: Devlin et al. 2018 (arXiv:1810.04805), section 3. The head before the output layer (linear, GELU,
    norm) follows their released code, `get_masked_lm_output`.

    >>> import torch
    >>> model = EncoderOnly(EncoderOnlyConfig(dim=8, num_heads=2), vocab_size=11)
    >>> model(torch.randint(4, 11, (2, 5)), torch.tensor([5, 3])).shape
    torch.Size([2, 5, 11])
    """

    def __init__(self, config: EncoderOnlyConfig | OneStackParts, *, vocab_size: int) -> None:
        super().__init__(_parts(config) if isinstance(config, EncoderOnlyConfig) else config, vocab_size)
        self.config = config

    def forward(
        self,
        ids: Shaped[Tensor, "B ..."],
        token_lengths: Integer[Tensor, " B"] | None = None,
        *,
        loss: OutputLoss | None = None,
    ) -> Float[Tensor, "B T V"] | tuple[Tensor, Tensor]:
        """Logits of the token at each position. Padding is never attended to.

        Args:
            ids: token ids (B, T), or the input of another front end: images (B, C, height, width) for `Patches`.
            token_lengths: the number of real tokens in each sequence; by default there is no padding.
            loss: called instead of the output layer, with the input of that layer and the layer.

        Raises:
            ArgumentError: a sequence is longer than the learned positions.
        """
        return self.read_out(self._last(ids, token_lengths), loss)

    def encode(
        self,
        ids: Shaped[Tensor, "B ..."],
        token_lengths: Integer[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """The vector of each token after the last layer; see `forward`."""
        return self.final_norm(self._last(ids, token_lengths))

    def attend(
        self,
        ids: Shaped[Tensor, "B ..."],
        token_lengths: Integer[Tensor, " B"] | None = None,
    ) -> dict[str, AttentionMap]:
        """Every attention map of a pass, by name: encoder.n, each (B, H, T, T)."""
        maps: dict[str, AttentionMap] = {}
        self._last(ids, token_lengths, maps.__setitem__)
        return maps

    def _last(self, inputs: Tensor, valid: Tensor | None, record: RecordMap | None = None) -> Tensor:
        x = self.embed(inputs)
        return self.run(x, None if valid is None else padding_mask(valid, x, record), record, "encoder")


class _Head(nn.Sequential):
    def __init__(self, config: EncoderOnlyConfig) -> None:
        super().__init__(nn.Linear(config.dim, config.dim), nn.GELU(), NORMS[config.norm](config.dim))


def _parts(config: EncoderOnlyConfig) -> OneStackParts:
    return one_stack_parts(config, "both", head=partial(_Head, config), output_bias=True)


@dataclass(frozen=True, slots=True, eq=False)
class DecoderOnlyState:
    """The decoding state; N sequences are the first dimension."""

    caches: tuple[MixerCache | None, ...]
    """Keys and values of the text so far, or the state of a recurrence, one entry per layer."""
    position: int | Integer[Tensor, " N"]
    """The position of the next token; a single integer if all prompts have the same length."""
    padding: Integer[Tensor, " N"] | None
    """The positions before each sequence's first token in the caches; None if all prompts have the same length."""


class DecoderOnly(OneStack):
    """A stack of layers with causal self-attention: a language model.

    Args:
        config: sizes and names of parts, or the parts themselves.
        vocab_size: number of tokens, V.

    Raises:
        ArgumentError: a part does not exist, or the sizes do not fit each other.

    Source: Radford et al. 2018, "Improving language understanding by generative pre-training", section 3.1. The
    norm before each sublayer is from Radford et al. 2019, "Language models are unsupervised multitask learners".

    >>> model = DecoderOnly(DecoderOnlyConfig(dim=8, num_heads=2), vocab_size=11).eval()
    >>> text = torch.randint(4, 11, (2, 5))
    >>> model(text).shape
    torch.Size([2, 5, 11])

    In decoding, the source is the text before the first token of a search:

    >>> state = model.start(text[:, :4], torch.tensor([4, 4]))
    >>> torch.allclose(model.step(state, text[:, 4]).logits, model(text)[:, 4], atol=1e-5)
    True
    """

    def __init__(self, config: DecoderOnlyConfig | OneStackParts, *, vocab_size: int) -> None:
        super().__init__(
            one_stack_parts(config, "left") if isinstance(config, DecoderOnlyConfig) else config, vocab_size
        )
        self.config = config

    def forward(
        self, ids: Integer[Tensor, "B T"], *, loss: OutputLoss | None = None
    ) -> Float[Tensor, "B T V"] | tuple[Tensor, Tensor]:
        """Logits of the token after each token. Padding at the end has logits too, and does not change other logits.

        With `loss`, the result of `loss`, called instead of the output layer with the input of that layer and the
        layer.

        Raises:
            ArgumentError: a sequence is longer than the learned positions.
        """
        return self.read_out(self.run(self.embed(ids), causal(), None, "decoder"), loss)

    def attend(self, ids: Integer[Tensor, "B T"]) -> dict[str, AttentionMap]:
        """Every attention map of a pass, by name: decoder.n, each (B, H, T, T)."""
        maps: dict[str, AttentionMap] = {}
        self.run(self.embed(ids), causal(), maps.__setitem__, "decoder")
        return maps

    def start(self, source: Integer[Tensor, "B S"], source_lengths: Integer[Tensor, " B"]) -> DecoderOnlyState:
        """Read the text before the first token of a search, all of it.

        Args:
            source: token ids, padded at the end with any id; the width may be 0.
            source_lengths: the number of real tokens in each text, 0 or more.

        Raises:
            ArgumentError: a length is not in 0..S, or a text is longer than the learned positions.
        """
        width, source_lengths = source.shape[1], source_lengths.long()
        if len(source_lengths) and not 0 <= int(source_lengths.min()) <= int(source_lengths.max()) <= width:
            raise ArgumentError(f"every text needs 0 to {width} tokens, as the batch is wide; got {source_lengths}")
        is_whole = bool((source_lengths == width).all())
        caches: tuple[MixerCache | None, ...] = (None,) * len(self.layers)
        if width:
            # (A state would remember padding, which no later query of attention sees.)
            has_states = any(isinstance(layer.self_attention, RecurrentMixer) for layer in self.each_layer())
            mask = causal() & lengths(source_lengths) if has_states and not is_whole else causal()
            caches, _ = self._extend(source, caches, mask, 0)
        if is_whole:
            return DecoderOnlyState(caches, width, None)
        # The padding moves before the tokens: a window then counts positions and keys alike.
        first = width - source_lengths
        aligned = tuple(None if cache is None else cache.shift(first) for cache in caches)
        return DecoderOnlyState(aligned, source_lengths, first)

    def step(self, state: DecoderOnlyState, ids: Integer[Tensor, " N"]) -> Step:
        """Logits after one more token."""
        caches, x = self._extend(ids[:, None], state.caches, _mask(state), state.position)
        return Step(self.read_out(x)[:, 0], None, replace(state, caches=caches, position=state.position + 1))

    def reorder(self, state: DecoderOnlyState, index: Integer[Tensor, " N"]) -> DecoderOnlyState:
        """The state of the sequences `index`, in that order."""
        index = index.long()  # An index of uint8 would be a mask.
        caches = tuple(None if cache is None else cache.reorder(index) for cache in state.caches)
        if state.padding is None:
            return replace(state, caches=caches)
        assert isinstance(state.position, Tensor)
        return DecoderOnlyState(caches, state.position[index], state.padding[index])

    def _extend(
        self, ids: Tensor, caches: tuple[MixerCache | None, ...], mask: Mask, offset: int | Tensor
    ) -> tuple[tuple[MixerCache, ...], Tensor]:
        """Read tokens after those of the caches: the longer caches, and the output of the last layer."""
        x, longer = self.embed(ids, offset), []
        for layer, cache in zip(self.each_layer(), caches, strict=True):
            x, extended = layer.extend(x, cache, mask, offset)
            longer.append(extended)
        return tuple(longer), x


def _mask(state: DecoderOnlyState) -> Mask:
    cache = state.caches[0]
    if state.padding is None or cache is None:
        return causal()
    return padding(torch.arange(cache.length + 1, device=state.padding.device) >= state.padding[:, None])
