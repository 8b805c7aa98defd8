"""kvpress chooses the keys of a cache by attention weights that fused attention computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import regard
from tests.inspection.huggingface_families import LLAMA, built

kvpress = pytest.importorskip("kvpress", reason="kvpress is in an environment of its own: make consumers ONLY=kvpress")
transformers = pytest.importorskip("transformers")


def llama(implementation: str) -> Any:
    return built("LlamaForCausalLM", LLAMA | {"max_position_embeddings": 256}, implementation)


@contextmanager
def fused(model: Any) -> Iterator[Any]:
    with regard.huggingface.enable(model):
        yield model


@contextmanager
def scores_of(kind: Any) -> Iterator[list[Tensor]]:
    found: list[Tensor] = []
    score = kind.score

    def recorded(self: Any, *args: Any) -> Tensor:
        found.append(score(self, *args))
        return found[-1].clone()

    kind.score = recorded
    try:
        yield found
    finally:
        kind.score = score


def prefilled(model: Any, press: Any, ids: Tensor) -> tuple[Any, Tensor]:
    """The cache of a prompt under a press, and the logits of four tokens that follow, one by one."""
    cache, logits = transformers.DynamicCache(), []
    with torch.no_grad(), press(model):
        model(ids[:, :-4], past_key_values=cache)
        for n in range(ids.shape[1] - 4, ids.shape[1]):
            place = torch.full((len(ids), 1), n)
            logits.append(model(ids[:, n : n + 1], past_key_values=cache, position_ids=place).logits)
    return cache, torch.cat(logits, 1)


def prompt() -> Tensor:
    return torch.randint(0, 50, (2, 44), generator=torch.Generator().manual_seed(0))


def test_observed_attention_over_fused_attention() -> None:
    kind, sides = kvpress.ObservedAttentionPress, []
    with scores_of(kind) as eager:
        sides.append(prefilled(llama("eager"), kind(0.5), prompt()))
    with scores_of(kind) as ours, fused(llama("sdpa")) as model:
        sides.append(prefilled(model, kind(0.5), prompt()))
    assert len(eager) == len(ours) == 2
    for one, other in zip(eager, ours, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
    (cache, expected), (same, found) = sides
    assert [layer.keys.shape for layer in same.layers] == [(2, 2, 24, 8)] * 2
    assert [layer.keys.shape for layer in same.layers] == [layer.keys.shape for layer in cache.layers]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


class Given(kvpress.ScorerPress):
    def __init__(self, scores: list[Tensor]) -> None:
        super().__init__(compression_ratio=0.5)
        self.scores = scores

    def score(self, module: Any, *others: Any) -> Tensor:
        return self.scores[module.layer_idx].clone()


COMBINED = {
    "AdaKV": kvpress.AdaKVPress,
    "AdaKV over CriticalKV": lambda press: kvpress.AdaKVPress(kvpress.CriticalKVPress(press)),
    "CriticalAdaKV": kvpress.CriticalAdaKVPress,
}


@pytest.mark.parametrize("combination", COMBINED)
def test_what_refuses_eager_attention_combines_with_observed_attention(combination: str) -> None:
    """Eager attention gives the weights, and is refused; ours gives them too, and runs."""
    combine, kind = COMBINED[combination], kvpress.ObservedAttentionPress
    with pytest.raises(AssertionError, match="eager mode not supported"):
        prefilled(llama("eager"), combine(kind(0.5)), prompt())
    with scores_of(kind) as scores:
        prefilled(llama("eager"), kind(0.5), prompt())
    # The same scores, under the attention that kvpress was written for.
    _, expected = prefilled(llama("sdpa"), combine(Given(scores)), prompt())
    with fused(llama("sdpa")) as model:
        _, found = prefilled(model, combine(kind(0.5)), prompt())
        assert any(getattr(layer.self_attn, "masked_key_indices", None) is not None for layer in model.model.layers)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    # Keys are hidden indeed: without a press the same tokens get other logits.
    _, plain = prefilled(llama("sdpa"), kvpress.KnormPress(0.0), prompt())
    assert float((plain - found).abs().max()) > 1e-3


TEXT, CACHE, INTERVAL = 4096, 512, 32


def test_a_long_generation_in_a_small_cache() -> None:
    """4,096 tokens that the model has drawn itself; the loss of the same text with all keys and with at most 512."""
    settings = LLAMA | {
        "vocab_size": 50,
        "max_position_embeddings": TEXT,
        "initializer_range": 0.25,
        "pad_token_id": None,
    }
    model = built("LlamaForCausalLM", settings)
    text = model.generate(
        torch.randint(3, 50, (1, 16)), max_length=TEXT, min_length=TEXT, do_sample=True, top_k=0, pad_token_id=0
    )
    assert text.shape == (1, TEXT)
    press = kvpress.DecodingPress(
        kvpress.ObservedAttentionPress(), compression_interval=INTERVAL, target_size=CACHE - INTERVAL
    )
    cache, logits, most = transformers.DynamicCache(), [], 0
    with torch.no_grad(), fused(model), press(model):
        logits.append(model(text[:, :16], past_key_values=cache).logits)
        for n in range(16, TEXT - 1):
            place = torch.tensor([[n]])
            logits.append(model(text[:, n : n + 1], past_key_values=cache, position_ids=place).logits)
            most = max(most, cache.layers[0].keys.shape[-2])
    with torch.no_grad():
        full = model(text[:, :-1]).logits
    # Beyond the first 512 tokens, where keys were dropped.
    losses = [
        float(F.cross_entropy(one[0, CACHE:].float(), text[0, CACHE + 1 :])) for one in (full, torch.cat(logits, 1))
    ]
    print(f"cross entropy with all keys {losses[0]:.3f}, with at most {most} of {TEXT} {losses[1]:.3f} nats")
    assert most <= CACHE
    torch.testing.assert_close(
        torch.cat(logits, 1)[:, : CACHE - INTERVAL], full[:, : CACHE - INTERVAL], rtol=0, atol=1e-3
    )
    assert losses[0] < losses[1] < 2 * losses[0]
