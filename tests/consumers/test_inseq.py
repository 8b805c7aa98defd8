"""inseq's attribution by attention weights, on enabled models: equal to that of eager attention."""

from typing import Any

import pytest
import torch

import regard
from tests.inspection.huggingface_families import BART, GPT2, built

inseq = pytest.importorskip("inseq", reason="inseq is in an environment of its own: make consumers ONLY=inseq")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "my", "dog"]


def tokenizer() -> Any:
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def gpt2(implementation: str) -> Any:
    marks = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return built("GPT2LMHeadModel", GPT2 | marks, implementation)


def bart(implementation: str) -> Any:
    marks = {"vocab_size": len(WORDS), "decoder_start_token_id": 2, "forced_eos_token_id": None}
    return built("BartForConditionalGeneration", BART | marks, implementation)


def attributed(make: Any, *, ours: bool, **options: Any) -> list[Any]:
    model = make("sdpa" if ours else "eager")
    if ours:
        regard.huggingface.enable(model)
    loaded = inseq.load_model(model, "attention", tokenizer=tokenizer())
    source = ["the cat sat on a mat", "my dog looked at the cat"]
    target = ["the cat sat on a mat and looked", "my dog looked at the cat and sat"]
    return loaded.attribute(source, target, show_progress=False, **options).sequence_attributions


@pytest.mark.parametrize("make", [gpt2, bart])
@pytest.mark.parametrize("options", [{}, {"attribute_target": True}], ids=str)
def test_attribution_by_attention(make: Any, options: dict[str, Any]) -> None:
    if make is gpt2 and options:
        pytest.skip("a decoder alone has nothing but its target")
    ours, theirs = (attributed(make, ours=is_ours, **options) for is_ours in (True, False))
    compared = 0
    for mine, right in zip(ours, theirs, strict=True):
        for name in ("source_attributions", "target_attributions"):
            found, expected = getattr(mine, name), getattr(right, name)
            assert (found is None) == (expected is None)
            if expected is not None:
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, equal_nan=True)
                compared += int(expected.nansum() > 0)
        for name, expected in right.sequence_scores.items():
            torch.testing.assert_close(mine.sequence_scores[name], expected, rtol=0, atol=1e-5, equal_nan=True)
    assert compared
