"""kvpress chooses the keys of a cache by attention weights that fused attention computed."""

from typing import Any

import pytest
import torch

import regard

kvpress = pytest.importorskip("kvpress", reason="kvpress is in an environment of its own: make consumers ONLY=kvpress")
transformers = pytest.importorskip("transformers")


def llama(implementation: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=256,
    )  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()


def test_an_enabled_model_of_an_older_transformers() -> None:
    ids = torch.randint(0, 50, (2, 17))
    plain, model = llama("eager"), llama("sdpa")
    regard.huggingface.enable(model)
    with torch.no_grad():
        theirs, ours = (m(ids, output_attentions=True) for m in (plain, model))
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-5)
    for mine, right in zip(ours.attentions, theirs.attentions, strict=True):
        torch.testing.assert_close(mine.dense(), right, rtol=0, atol=1e-5)
