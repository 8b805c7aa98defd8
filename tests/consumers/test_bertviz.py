"""bertviz draws the attentions of an enabled model: the pages are those of eager attention, number for number."""

import json
import re
from typing import Any

import pytest
import torch

import regard
from tests.inspection.huggingface_families import BART, SMALL, built

bertviz = pytest.importorskip("bertviz", reason="bertviz is in an environment of its own: make consumers ONLY=bertviz")
pytest.importorskip("transformers")

TOKENS = [f"t{n}" for n in range(9)]


def bert(implementation: str) -> Any:
    return built("BertModel", SMALL | {"num_hidden_layers": 3}, implementation)


def bart(implementation: str) -> Any:
    return built("BartModel", BART, implementation)


def outputs(make: Any, *, ours: bool, **inputs: Any) -> Any:
    model = make("sdpa" if ours else "eager")
    if ours:
        regard.huggingface.enable(model)
    with torch.no_grad():
        return model(**inputs, output_attentions=True)


def numbers(page: Any) -> list[Any]:
    params = re.search(r"const params = (\{.*?\}); // HACK", page.data)
    assert params is not None
    told = json.loads(params[1])
    return [(one["name"], one["left_text"], one["right_text"], torch.tensor(one["attn"])) for one in told["attention"]]


def same(ours: Any, theirs: Any) -> None:
    pairs = list(zip(numbers(ours), numbers(theirs), strict=True))
    assert pairs
    for (*words, mine), (*other, right) in pairs:
        assert words == other
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("view", [bertviz.head_view, bertviz.model_view])
@pytest.mark.parametrize("choice", [{}, {"include_layers": [0, 2]}, {"sentence_b_start": 4}], ids=str)
def test_self_attention(view: Any, choice: dict[str, Any]) -> None:
    ids = torch.randint(0, 30, (1, 9))
    ours, theirs = (
        view(outputs(bert, ours=is_ours, input_ids=ids).attentions, TOKENS, html_action="return", **choice)
        for is_ours in (True, False)
    )
    same(ours, theirs)


@pytest.mark.parametrize("view", [bertviz.head_view, bertviz.model_view])
def test_an_encoder_and_a_decoder(view: Any) -> None:
    inputs = {"input_ids": torch.randint(0, 30, (1, 9)), "decoder_input_ids": torch.randint(0, 30, (1, 5))}
    pages = []
    for is_ours in (True, False):
        found = outputs(bart, ours=is_ours, **inputs)
        pages.append(
            view(
                encoder_attention=found.encoder_attentions, decoder_attention=found.decoder_attentions,
                cross_attention=found.cross_attentions, encoder_tokens=TOKENS, decoder_tokens=TOKENS[:5],
                html_action="return",
            )
        )  # fmt: skip
    same(*pages)


def test_the_input_is_stacked_without_a_matrix() -> None:
    """bertviz's work before it writes numbers stays lazy; writing them needs the matrix, and says so."""
    attentions = outputs(bert, ours=True, input_ids=torch.randint(0, 30, (1, 9))).attentions
    with regard.maps.strict_maps():
        stacked = bertviz.util.format_attention(attentions, [0, 1], [1, 3])
        assert isinstance(stacked, regard.AttentionMap)
        assert stacked.shape == (2, 2, 9, 9)
        with pytest.raises(regard.errors.TooLargeError, match="tolist"):
            bertviz.head_view(attentions, TOKENS, html_action="return")
