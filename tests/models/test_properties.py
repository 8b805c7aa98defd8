"""Properties of both models: padding never changes a result, and nothing looks ahead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.models import RNNConfig, RNNSeq2Seq, Seq2Seq, Transformer, TransformerConfig

PAD, BOS, EOS, VOCAB = 0, 1, 2, 17
SOURCE, TARGET = 7, 5


def transformer(**changes: object) -> Transformer:
    sizes: dict[str, Any] = {
        "dim": 12,
        "num_heads": 3,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "feed_forward_dim": 19,
    }
    config = TransformerConfig(**(sizes | {"dropout": 0.0, "tied_output": False} | changes))
    return Transformer(config, source_vocab_size=VOCAB, target_vocab_size=VOCAB)


def rnn(**changes: object) -> RNNSeq2Seq:
    sizes: dict[str, Any] = {"embedding_dim": 5, "hidden_dim": 7, "attention_dim": 11, "dropout": 0.0}
    return RNNSeq2Seq(RNNConfig(**(sizes | changes)), source_vocab_size=VOCAB, target_vocab_size=VOCAB)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": transformer,
    "transformer post-norm, grouped, learned": lambda: transformer(
        norm_position="post", num_kv_heads=1, positions="learned", max_length=SOURCE
    ),
    "transformer swiglu rms": lambda: transformer(activation="swiglu", norm="rms"),
    "bahdanau": rnn,
    "luong dot": lambda: rnn(decoder="luong", score="dot"),
    "two layers": lambda: rnn(encoder_layers=2),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def padded_batch(lengths: list[int], target_lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.full((len(lengths), SOURCE), PAD)
    target = torch.full((len(lengths), TARGET), PAD)
    for b, (n, m) in enumerate(zip(lengths, target_lengths, strict=True)):
        source[b, :n] = torch.randint(3, VOCAB, (n,))
        target[b, :m] = torch.randint(3, VOCAB, (m,))
    return source, torch.tensor(lengths), target


@every_model
def test_weights_go_by_their_names_and_half_precision_is_close(make: Callable[[], Any]) -> None:
    one, two, given = make(), make(), padded_batch([7, 4], [5, 3])
    assert isinstance(make(), Seq2Seq)
    two.load_state_dict(one.state_dict())
    expected = one(*given)
    assert torch.equal(two(*given), expected)
    half = two.bfloat16()(*given)
    assert half.dtype == torch.bfloat16
    assert (half.float() - expected).abs().max() < 0.03 * expected.abs().max()


@every_model
@settings(max_examples=8)
@given(lengths=st.lists(st.integers(1, SOURCE), min_size=2, max_size=3), seed=st.integers(0, 99))
def test_alone_and_in_a_padded_batch_the_logits_are_the_same(
    make: Callable[[], nn.Module], lengths: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    model = make()
    target_lengths = torch.randint(1, TARGET + 1, (len(lengths),)).tolist()
    source, source_lengths, target = padded_batch(lengths, target_lengths)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        model = model.to(dtype)
        with torch.no_grad():
            together = model(source, source_lengths, target)
            for b, (n, m) in enumerate(zip(lengths, target_lengths, strict=True)):
                alone = model(source[b : b + 1, :n], source_lengths[b : b + 1], target[b : b + 1, :m])
                torch.testing.assert_close(together[b : b + 1, :m], alone, rtol=0, atol=tolerance)
