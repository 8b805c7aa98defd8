"""Each feature of the book's tables is found in a model that has it, and in none of another that has not."""

import re
import runpy

from tests import ROOT

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
