"""The operators of a decoding step, on which the time of small models depends: ours against transformers' own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard.call.rotary import rotary
from regard.models import DecoderOnly, DecoderOnlyConfig
from regard.tensors.guards import KeptPlace
from tests.operators import operators_of
from tests.searches import greedy

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
TEXT = torch.arange(4, 20).reshape(2, 8)
LAYERS = 12
MOST = 1.1
"""Ours, of transformers' own."""


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=2,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def generated(model: Any, mask: torch.Tensor) -> Callable[[int], object]:
    return lambda steps: model.generate(
        TEXT, attention_mask=mask, do_sample=False, max_new_tokens=steps, min_new_tokens=steps
    )


def of_a_step(run: Callable[[int], object]) -> int:
    with torch.no_grad():
        run(3)
        return operators_of(lambda: run(5)).total() - operators_of(lambda: run(4)).total()


def test_a_step_of_our_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a Llama of its sizes. What counts operators would keep the angles of the layers from being shared."""
    monkeypatch.setattr(rotary, "where_kept", lambda x: KeptPlace(x.device, 0))
    config = DecoderOnlyConfig(
        dim=32, num_heads=2, num_layers=LAYERS, feed_forward_dim=128, dropout=0.0, activation="swiglu", norm="rms",
        positions="rotary",
    )  # fmt: skip
    model, lengths = DecoderOnly(config, vocab_size=64).eval(), torch.full((2,), 8)
    ours = of_a_step(lambda steps: greedy(model, TEXT, lengths, bos_id=1, eos_id=-1, max_steps=steps))
    assert ours <= MOST * of_a_step(generated(llama(), torch.ones_like(TEXT)))


@pytest.mark.parametrize("padded", [False, True])
def test_a_step_of_an_enabled_model(padded: bool) -> None:
    model, mask = llama(), torch.ones_like(TEXT)
    mask[0, :3] = 0 if padded else 1
    theirs = of_a_step(generated(model, mask))
    with regard.huggingface.enable(model):
        ours = of_a_step(generated(model, mask))
    assert ours <= MOST * theirs, (ours, theirs)
