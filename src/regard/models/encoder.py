"""A Transformer's encoder by itself, which reads a text in both directions (Devlin et al. 2019, arXiv:1810.04805)."""

from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.masks import lengths as up_to
from regard.models.parts import EncoderParts
from regard.models.transformer import EncoderLayer, Record, shared_bias
from regard.nn import TokenEmbedding
from regard.weights import AttentionMap


class TransformerEncoder(nn.Module):
    """Vectors of the tokens of a text, each of which has looked at all of them; and logits of masked tokens.

    Args:
        parts: what it is built from.
        vocab_size: number of tokens, V.

    Source: Devlin et al. 2019 (arXiv:1810.04805), section 3.

    >>> from functools import partial
    >>> from regard.models.parts import StackParts
    >>> from regard.nn import FeedForward, LearnedPositions, MultiHeadAttention, PostNorm
    >>> stack = StackParts(
    ...     num_layers=2,
    ...     attention=partial(MultiHeadAttention, 8, 2),
    ...     feed_forward=partial(FeedForward, 8, 16),
    ...     residual=partial(PostNorm, 8),
    ...     positions=partial(LearnedPositions, 20, 8),
    ... )
    >>> model = TransformerEncoder(EncoderParts(dim=8, stack=stack, head=nn.Identity), vocab_size=11)
    >>> tokens, lengths = torch.randint(0, 11, (2, 5)), torch.tensor([5, 3])
    >>> model.encode(tokens, lengths).shape, model(tokens, lengths).shape
    (torch.Size([2, 5, 8]), torch.Size([2, 5, 11]))
    """

    def __init__(self, parts: EncoderParts, *, vocab_size: int) -> None:
        super().__init__()
        stack = parts.stack
        self.embedding = TokenEmbedding(vocab_size, parts.dim, scale=parts.embedding_scale)
        self.segments = nn.Embedding(parts.num_segments, parts.dim) if parts.num_segments else None
        self.positions, self.embedding_norm = stack.positions(), stack.embedding_norm()
        self.dropout = nn.Dropout(parts.dropout)
        self.bias = None if stack.relative is None else stack.relative()
        self.layers = nn.ModuleList([EncoderLayer(stack) for _ in range(stack.num_layers)])
        self.final_norm = stack.final_norm()
        self.head = None if parts.head is None else parts.head()
        self.output_bias = None if parts.head is None else nn.Parameter(torch.zeros(vocab_size))

    def forward(
        self, tokens: Int[Tensor, "B S"], lengths: Int[Tensor, " B"], segments: Int[Tensor, "B S"] | None = None
    ) -> Float[Tensor, "B S V"]:
        """Logits of the token at each place.

        Args:
            tokens: ids; what lies beyond a text's length is never looked at.
            lengths: number of tokens of each text.
            segments: which kind of text each token belongs to; all to the first if None.

        Raises:
            ArgumentError: the model has no output layer, or the text is longer than learned positions.
        """
        if self.head is None or self.output_bias is None:
            raise ArgumentError("this encoder has no output layer: it answers encode(), not logits")
        hidden = self.head(self.encode(tokens, lengths, segments))
        return nn.functional.linear(hidden, self.embedding.weight, self.output_bias)

    def encode(
        self,
        tokens: Int[Tensor, "B S"],
        lengths: Int[Tensor, " B"],
        segments: Int[Tensor, "B S"] | None = None,
        record: Record | None = None,
    ) -> Float[Tensor, "B S D"]:
        """The vectors after the last layer."""
        x = self.embedding(tokens)
        if self.segments is not None:
            x = x + self.segments(torch.zeros_like(tokens) if segments is None else segments)
        x = self.dropout(self.embedding_norm(self.positions(x)))
        mask, bias = up_to(lengths), shared_bias(self.bias)
        for number, layer in enumerate(self.layers):
            x = cast(EncoderLayer, layer)(x, mask, bias, record, f"encoder.{number}")
        return self.final_norm(x)

    def attend(
        self, tokens: Int[Tensor, "B S"], lengths: Int[Tensor, " B"], segments: Int[Tensor, "B S"] | None = None
    ) -> dict[str, AttentionMap]:
        """Every attention map of a pass: encoder.n, each (B, H, S, S)."""
        maps: dict[str, AttentionMap] = {}
        self.encode(tokens, lengths, segments, maps.__setitem__)
        return maps
