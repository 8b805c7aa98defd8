"""Layers that are computed again on the way back: the same bits, and what cannot be recomputed is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.models.config import DecoderOnlyConfig, RNNConfig, TransformerConfig
from regard.models.one_stack import DecoderOnly
from regard.models.rnn import RNNSeq2Seq
from regard.models.transformer import Transformer
from regard.nn import MultiHeadAttention
from regard.tasks.runs.run import recompute_layers
from regard.tasks.training.optimizers import adamw


def steps(model: torch.nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The losses of a few steps, with dropout."""
    torch.manual_seed(5)
    optimizer = adamw(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    losses = []
    for _ in range(3):
        loss = model(*inputs).logsumexp(-1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("attention_dropout", [0.0, 0.2])
def test_recomputed_layers_give_the_same_bits(attention_dropout: float) -> None:
    sizes: dict[str, Any] = {
        "dim": 12,
        "num_heads": 2,
        "feed_forward_dim": 20,
        "dropout": 0.3,
        "attention_dropout": attention_dropout,
    }
    tokens, lengths = torch.randint(4, 17, (3, 7)), torch.tensor([7, 2, 5])

    def make(name: str) -> tuple[torch.nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(2)
        if name == "decoder":
            return DecoderOnly(DecoderOnlyConfig(num_layers=2, **sizes), vocab_size=17), (tokens,)
        config = TransformerConfig(encoder_layers=2, decoder_layers=2, **sizes)
        return Transformer(config, source_vocab_size=17, target_vocab_size=17), (tokens, lengths, tokens[:, :5])

    for name in ("decoder", "translator"):
        plain, inputs = make(name)
        again, _ = make(name)
        recompute_layers(again)
        runs_of_attention = count_calls(again)
        assert torch.equal(steps(plain, inputs), steps(again, inputs))
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), again.parameters(), strict=True))
        assert runs_of_attention[0] == 2 * 3  # there and back, in each step


def count_calls(model: torch.nn.Module) -> list[int]:
    """How often the first attention module is called."""
    calls = [0]

    def note(*_: Any) -> None:
        calls[0] += 1

    next(m for m in model.modules() if isinstance(m, MultiHeadAttention)).register_forward_pre_hook(note)
    return calls


def test_a_model_without_layers_has_nothing_to_recompute() -> None:
    with pytest.raises(ArgumentError, match="RNNSeq2Seq has no stack"):
        recompute_layers(RNNSeq2Seq(RNNConfig(), source_vocab_size=9, target_vocab_size=9))
