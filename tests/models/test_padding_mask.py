"""Models whose sequences are all whole mask nothing: only the time tells the difference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import regard
from regard.call.masks.basic import Lengths
from regard.models import EncoderOnly, EncoderOnlyConfig, Transformer, TransformerConfig, one_stack, transformer
from regard.models.stack import padding_mask

TOKENS = torch.randint(4, 30, (3, 6), generator=torch.Generator().manual_seed(0))
WHOLE = torch.full((3,), 6)
SIZES: dict[str, Any] = {"dim": 16, "num_heads": 2, "feed_forward_dim": 24}


def encoder() -> Callable[[Tensor], Tensor]:
    model = EncoderOnly(EncoderOnlyConfig(num_layers=2, **SIZES), vocab_size=30).eval()
    return lambda lengths: model(TOKENS, lengths)


def whole_model() -> Callable[[Tensor], Tensor]:
    config = TransformerConfig(encoder_layers=2, decoder_layers=2, **SIZES)
    model = Transformer(config, source_vocab_size=30, target_vocab_size=30).eval()
    return lambda lengths: model(TOKENS, lengths, TOKENS[:, :4])


@torch.no_grad()
@pytest.mark.parametrize("make", [encoder, whole_model])
@pytest.mark.parametrize("lengths", [WHOLE, WHOLE + 3, torch.tensor([6, 2, 6])])
def test_the_bits_are_those_of_the_mask(
    make: Callable[[], Callable[[Tensor], Tensor]], lengths: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    found = model(lengths)
    for module in (one_stack, transformer):
        monkeypatch.setattr(module, "padding_mask", lambda valid, *_: regard.lengths(valid))
    assert torch.equal(found, model(lengths))


@torch.no_grad()
def test_where_nothing_is_padded_there_is_no_mask() -> None:
    assert padding_mask(WHOLE, TOKENS) is None
    assert padding_mask(WHOLE + 1, TOKENS) is None
    for lengths in (torch.tensor([6, 5, 6]), torch.tensor([6, 0, 6])):
        assert isinstance(padding_mask(lengths, TOKENS), Lengths)
    assert isinstance(padding_mask(WHOLE[:0], TOKENS[:0]), Lengths)
    assert isinstance(padding_mask(WHOLE * 0, TOKENS[:, :0]), Lengths)
    assert isinstance(padding_mask(WHOLE[:2], TOKENS), Lengths)  # which is refused as ever


def test_whoever_looks_at_the_calls_sees_their_mask() -> None:
    assert isinstance(padding_mask(WHOLE, TOKENS), Lengths)  # gradients are recorded
    with torch.no_grad():
        assert isinstance(padding_mask(WHOLE, TOKENS, lambda _name, _map: None), Lengths)
        model = Transformer(TransformerConfig(**SIZES), source_vocab_size=30, target_vocab_size=30).eval()
        with regard.watch(model) as seen:
            model(TOKENS, WHOLE, TOKENS)
        assert ", lengths" in repr(seen.maps[0])
        with FakeTensorMode():
            assert isinstance(padding_mask(torch.full((3,), 6), torch.zeros(3, 6)), Lengths)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_keeps_the_mask() -> None:
    masks: list[Any] = []

    def call(valid: Tensor) -> Tensor:
        masks.append(padding_mask(valid, TOKENS))
        return valid + 1

    torch.jit.trace(call, WHOLE, check_trace=False)
    assert isinstance(masks[0], Lengths)
