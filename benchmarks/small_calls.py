"""One short sequence through modules and models, against torch.nn's own with its fast path.

    python -m benchmarks small_calls

Batch 1, length 32, evaluation mode, no gradients but in the last row, float32: what is compared is how much there is
around the products. torch takes its fast path (`torch._transformer_encoder_layer_fwd`,
`torch._native_multi_head_attention`) in exactly these conditions. The weights of both sides are the same where they
have the same parts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import regard
from benchmarks.harness import Row, Run, compare, forward_backward
from regard.models import EncoderOnly, EncoderOnlyConfig, Transformer, TransformerConfig
from regard.nn import MultiHeadAttention

TITLE = "One short sequence, against torch.nn with its fast path"
DIM, HEADS, HIDDEN, LAYERS, LENGTH, VOCABULARY, CALLS = 256, 4, 1_024, 3, 32, 1_000, 100


def many(call: Run) -> Run:
    """A run of many calls: one alone is shorter than the clock is fine."""

    @torch.no_grad()
    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def modules() -> list[Row]:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True).eval()
    ours = MultiHeadAttention.from_torch(theirs)
    x = torch.randn(1, LENGTH, DIM)
    assert torch.allclose(theirs(x, x, x)[0], ours(x), atol=1e-5)

    def blind() -> object:
        return theirs(x, x, x, need_weights=False)

    def seen() -> object:
        return theirs(x, x, x, average_attn_weights=False)

    pairs: dict[str, tuple[Run, Run]] = {
        "MultiHeadAttention": (blind, lambda: ours(x)),
        "MultiHeadAttention, with weights": (seen, lambda: ours(x, return_weights=True)),
        "MultiHeadAttention, with weights that are read": (
            seen,
            lambda: ours(x, return_weights=True).weights.dense(),
        ),
    }
    return [compare(f"{CALLS} calls, {name}", *map(many, sides), target=1.0) for name, sides in pairs.items()]


class TorchEncoder(nn.Module):
    """The stack as torch has it, between the embedding, the head and the output layer that ours has."""

    def __init__(self, model: EncoderOnly) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, batch_first=True, norm_first=False)
        self.stack = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.embedding, self.head, self.output = model.embedding, model.head, model.output

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.stack(self.embedding(tokens))
        return self.output(self.head(hidden))


def models() -> list[Row]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"dim": DIM, "num_heads": HEADS, "feed_forward_dim": HIDDEN}
    config = EncoderOnlyConfig(
        num_layers=LAYERS, norm_position="post", positions="sinusoidal", activation="relu", **sizes
    )
    encoder = EncoderOnly(config, vocab_size=VOCABULARY).eval()
    their_encoder = TorchEncoder(encoder).eval()
    whole = Transformer(
        TransformerConfig(norm_position="post", **sizes), source_vocab_size=VOCABULARY, target_vocab_size=VOCABULARY
    ).eval()
    their_whole = nn.Transformer(DIM, HEADS, LAYERS, LAYERS, HIDDEN, batch_first=True).eval()
    tokens, lengths = torch.randint(4, VOCABULARY, (1, LENGTH)), torch.tensor([LENGTH])
    future = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def torch_whole() -> object:
        x = whole.source_embedding(tokens)
        return whole.output(their_whole(x, x, tgt_mask=future, tgt_is_causal=True))

    pairs: dict[str, tuple[Run, Run]] = {
        "encoder of 3 layers": (lambda: their_encoder(tokens), lambda: encoder(tokens, lengths)),
        "Transformer of 3 + 3 layers": (torch_whole, lambda: whole(tokens, lengths, tokens)),
    }
    return [compare(f"{CALLS} calls, {name}", *map(many, sides), target=1.0) for name, sides in pairs.items()]


def there_and_back() -> Row:
    """One call of the function with its gradients; nothing is asked of it but to be short."""
    heads = [torch.randn(1, HEADS, LENGTH, DIM // HEADS, requires_grad=True) for _ in range(3)]

    def calls(attend: Callable[..., Tensor]) -> Run:
        one = forward_backward(attend, *heads)
        return lambda: [one() for _ in range(CALLS)]

    torch_s, ours = calls(nn.functional.scaled_dot_product_attention), calls(regard.attention)
    return compare(f"{CALLS} calls, attention and its gradients", torch_s, ours)


def run() -> tuple[list[Row], list[str]]:
    note = f"Width {DIM}, {HEADS} heads, hidden {HIDDEN}; a row is {CALLS} calls."
    return [*modules(), *models(), there_and_back()], [note]
