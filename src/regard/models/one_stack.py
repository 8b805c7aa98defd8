"""The common part of the decoder-only and the encoder-only Transformer: one stack from token ids to logits."""

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

from jaxtyping import Float, Shaped
from torch import Tensor, nn

from regard.call.masks.base import Mask
from regard.errors import require
from regard.models.parts import OneStackParts
from regard.models.protocol import OutputLoss, RecordMap
from regard.models.stack import SelfAttentionLayer, shared_bias
from regard.nn import TokenEmbedding
from regard.nn.arguments import require_sizes


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
        self.embedding_norm = parts.stack.embedding_norm()
        self.dropout = nn.Dropout(parts.dropout)
        self.relative = None if parts.stack.relative is None else parts.stack.relative()
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
        return self.dropout(self.embedding_norm(self.positions(self.embedding(inputs), offset=offset)))

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
        bias = shared_bias(self.relative)
        for number, layer in enumerate(self.layers):
            x = layer(x, mask, bias, record, f"{name}.{number}")
        return x

    def each_layer(self) -> Iterator[SelfAttentionLayer]:
        """The layers, from first to last."""
        return (cast(SelfAttentionLayer, layer) for layer in self.layers)
