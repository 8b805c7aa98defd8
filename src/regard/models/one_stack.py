"""The common part of the decoder-only and the encoder-only Transformer: one stack from token ids to logits."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, cast

from jaxtyping import Float, Shaped
from torch import Tensor, nn

from regard.call.masks.base import Mask
from regard.call.masks.patterns import window
from regard.call.rotary.rotary import Rotary
from regard.errors import require
from regard.models.config import OneStackConfig, read_layers
from regard.models.parts import MakeAttention, Maker, OneStackParts
from regard.models.protocol import OutputLoss, RecordMap
from regard.models.stack import SelfAttentionLayer, attention_of, make_stack, shared_bias
from regard.nn import GatedDeltaNet, LightningAttention, Mamba2, TokenEmbedding
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
