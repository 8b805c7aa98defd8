"""Abilities that chapters claim, on three seeds: a model that can, one that cannot, and a control are trained."""

import re
import runpy
from typing import Any

import pytest
import torch

import regard
from regard.call.normalizations import Sigmoid, SoftmaxWithSink
from regard.models import DecoderOnly, DecoderOnlyConfig
from tests import ROOT
from tests.book.chapters import cells, names_of, path_of

pytestmark = pytest.mark.usefixtures("as_installed")
SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bias_of_the_keys_changes_nothing_until_positions_turn_them(seed: int) -> None:
    torch.manual_seed(seed)
    query, key, bias = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8), 3 * torch.randn(8)
    turn = regard.Rotary(8)

    def moved(turned: Any = lambda x: x, **how: Any) -> float:
        before, after = (regard.map_of(turned(query), turned(keys), **how).dense() for keys in (key, key + bias))
        return (before - after).abs().max().item()

    ends = moved(turn.rotate), moved(normalization=Sigmoid()), moved(normalization=SoftmaxWithSink())
    assert moved() < 1e-5 < 0.1 < min(ends)


def test_one_head_learns_both_neighbours_if_its_reader_is_no_single_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_of("07-many-heads")

    class Reader(names["Neighbours"]):  # type: ignore[misc]
        def __init__(self, heads: int) -> None:
            super().__init__(heads)
            self.read = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 20))

    monkeypatch.setitem(names["train"].__globals__, "Neighbours", Reader)
    assert names["train"](1)[0] > 0.95 > 0.7 > names["results"][1][0]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sharp_softmax_is_moved_by_adam_and_not_by_gradient_descent(seed: int) -> None:
    names = dict(names_of("03-query-key-value"))
    torch.manual_seed(seed)
    names["learned"].__globals__["scores"] = torch.randn(8)
    by_descent, by_adam = (
        [names["learned"](factor, optimizer, rate) for factor in (0.1, 1, 10)]
        for optimizer, rate in ((torch.optim.SGD, 0.5), (torch.optim.Adam, 0.03))
    )
    assert by_descent[2] < 0.1 < by_descent[0] < 0.3 < 0.9 < by_descent[1]
    assert min(by_adam[1:]) > 0.9


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bilinear_score_finds_the_nearest_of_wide_keys_alone(seed: int) -> None:
    names = names_of("05-additive-and-bilinear-scores")
    torch.manual_seed(seed)
    train, bilinear = names["trained"], names["bilinear"]
    shapes = (16, 2), (16, 2), (16,)
    by_sum = train(names["additive"], *(torch.nn.Parameter(torch.randn(shape)) for shape in shapes))
    narrow = train(bilinear, torch.nn.Parameter(torch.randn(2, 2)))
    wide = train(bilinear, torch.nn.Parameter(torch.randn(32, 32) / 10), widen=names["waves"])
    assert narrow < 0.5 < 0.8 < min(by_sum, wide)


class Recurrent(torch.nn.Module):
    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(size, dim)
        self.layers = torch.nn.GRU(dim, dim, 2, batch_first=True)
        self.output = torch.nn.Linear(dim, size)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.output(self.layers(self.embedding(words))[0])
        return found


@pytest.mark.slow
def test_the_verb_needs_the_first_animal_by_attention_or_by_a_state() -> None:
    names = names_of("10-a-language-model")
    size, small, pairs = len(names["vocabulary"]), names["small"], names["simple"]["frequency of pairs"]
    for seed in SEEDS:
        loss = {}
        for name, make in {
            "attention": lambda: DecoderOnly(DecoderOnlyConfig(**small, dropout=0.0), vocab_size=size),
            "itself alone": lambda: DecoderOnly(
                DecoderOnlyConfig(**small, dropout=0.0, layers="sliding", window=1), vocab_size=size
            ),
            "a state": lambda: Recurrent(size, small["dim"]),
        }.items():
            torch.manual_seed(seed)
            model: Any = make()
            names["train"](model, lambda model: names["next_word"](model, names["some_text"]()), steps=180)
            with torch.no_grad():
                loss[name] = names["next_word"](model, names["test"]).item()
        assert max(loss["attention"], loss["a state"]) < pairs - 0.02, (seed, loss)
        assert loss["itself alone"] == pytest.approx(pairs, abs=0.02), (seed, loss)


@pytest.mark.slow
def test_one_layer_does_not_continue_a_pattern_and_two_do() -> None:
    import transformers

    source = cells(path_of("11-looking-inside").read_text(encoding="utf-8"))[0].code
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source.split("torch.manual_seed(0)")[0], names)
    sizes: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings"), 64)
    sizes["rotary_pct"] = 1.0

    def second_round(layers: int, heads: int, seed: int) -> float:
        torch.manual_seed(seed)
        config = transformers.GPTNeoXConfig(
            vocab_size=20, num_hidden_layers=layers, num_attention_heads=heads, bos_token_id=0, eos_token_id=0,
            **sizes,
        )  # fmt: skip
        model = transformers.GPTNeoXForCausalLM(config)
        optimizer, mean = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.98)), 3.0
        for _ in range(800):
            _, second = names["losses_of"](model, length=int(torch.randint(4, 11, ())))
            mean = 0.9 * mean + 0.1 * second.item()
            optimizer.zero_grad()
            second.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if mean < 0.3:
                break
        return mean

    for seed in SEEDS:
        assert second_round(2, 2, seed) < 0.3, seed
        assert min(second_round(1, 2, seed), second_round(1, 4, seed)) > 1.2, seed


MODELS = runpy.run_path(str(ROOT / "docs/_extensions/in_models.py"))
KNOWN = {
    "keys without a bias": ("whisper", "llama"),
    "queries, keys and values by one matrix": ("gpt2", "bert"),
    "a scale of its own": ("gemma2", "llama"),
    "grouped heads": ("llama", "gpt2"),
    "rotary positions": ("llama", "bert"),
    "part of a head rotated": ("gpt_neox", "bert"),
    "sinusoidal positions": ("marian", "llama"),
    "learned positions": ("gpt2", "llama"),
    "layers without positions": ("smollm3", "qwen3"),
    "relative positions as a bias": ("t5", "llama"),
    "sliding windows": ("mistral", "gpt2"),
    "sliding and full layers": ("gemma3", "gpt2"),
    "causal masks": ("llama", "vit"),
    "packed rows": ("qwen2_vl", "bart"),
    "norms of queries and keys": ("qwen3", "llama"),
    "soft caps": ("gemma2", "llama"),
    "sinks": ("gpt_oss", "llama"),
    "output gates": ("qwen3_next", "gpt2"),
    "latent keys": ("deepseek_v3", "llama"),
    "linear layers": ("qwen3_next", "gpt2"),
    "mixtures of experts": ("mixtral", "gpt2"),
    "cross-attention": ("marian", "bert"),
    "an encoder and a decoder": ("bart", "llama"),
    "recurrent layers": ("encodec", "llama"),
    "norm before attention": ("llama", "bert"),
    "a head that predicts the next token": ("llama", "vit"),
    "a head that fills masks": ("bert", "llama"),
    "fused kernels": ("llama", "xlnet"),
    "weights handed back": ("gpt2", "llama"),
}


def test_each_feature_is_in_a_model_that_has_it_and_not_in_one_that_has_not() -> None:
    texts, features = MODELS["sources"](), MODELS["FEATURES"]
    assert set(features) == set(KNOWN), "two known models for each feature"
    assert "auto" not in texts, "a folder of tables is no model"
    found = {name: tuple(bool(re.search(features[name], texts[model])) for model in KNOWN[name]) for name in KNOWN}
    assert {name: answers for name, answers in found.items() if answers != (True, False)} == {}
