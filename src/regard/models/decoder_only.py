"""The decoder-only Transformer: it predicts each token from the tokens before it (Radford et al. 2018)."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from regard.call.masks.base import Mask
from regard.call.masks.basic import causal, lengths, padding
from regard.errors import ArgumentError
from regard.maps.attention_map import AttentionMap
from regard.models.config import DecoderOnlyConfig
from regard.models.one_stack import OneStack, one_stack_parts
from regard.models.parts import OneStackParts
from regard.models.protocol import OutputLoss, Step
from regard.models.stack import shared_bias
from regard.nn.cache import MixerCache
from regard.nn.recurrent_mixers import RecurrentMixer


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
        x, bias, longer = self.embed(ids, offset), shared_bias(self.relative), []
        for layer, cache in zip(self.each_layer(), caches, strict=True):
            x, extended = layer.extend(x, cache, mask, bias, offset)
            longer.append(extended)
        return tuple(longer), x


def _mask(state: DecoderOnlyState) -> Mask:
    cache = state.caches[0]
    if state.padding is None or cache is None:
        return causal()
    return padding(torch.arange(cache.length + 1, device=state.padding.device) >= state.padding[:, None])
