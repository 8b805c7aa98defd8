"""The encoder-only Transformer: it predicts each token from the tokens on both sides (Devlin et al. 2018)."""

from functools import partial

from jaxtyping import Float, Integer, Shaped
from torch import Tensor, nn

from regard.maps.attention_map import AttentionMap
from regard.models.config import EncoderOnlyConfig
from regard.models.one_stack import OneStack, one_stack_parts
from regard.models.parts import OneStackParts
from regard.models.protocol import OutputLoss, RecordMap
from regard.models.stack import NORMS, padding_mask


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
