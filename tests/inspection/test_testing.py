"""`assert_sound`: a test of a model's attention in one line."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard
from regard.errors import ArgumentError
from regard.testing import assert_sound
from tests.modules import parts


@parts(lambda *, hands_on: {"embedding": nn.Embedding(9, 4), "hands_on": hands_on}, seed=0)
def Tokens(self: Any, ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    """Attention over tokens with a padding mask, True for real tokens."""
    x = self.embedding(ids)[:, None]
    mask = attention_mask[:, None, None].bool() if self.hands_on else None
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)[:, 0]


BATCH = {"ids": torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]]), "attention_mask": torch.tensor([[1] * 4, [1, 1, 0, 0]])}


def test_a_sound_model_passes() -> None:
    assert_sound(Tokens(hands_on=True), BATCH, causal=False)


def test_a_lost_mask_is_told_with_its_module_its_share_and_its_remedy() -> None:
    with pytest.raises(AssertionError) as raised:
        assert_sound(Tokens(hands_on=False), BATCH)
    said = str(raised.value)
    found = regard.check(Tokens(hands_on=False), BATCH)
    assert said.startswith("the attention of Tokens is not sound\nerror: ")
    assert found.errors
    assert found.errors[0].says in said
    assert all(one.remedy in said for one in found.faults)


def test_only_intended_reasons_are_ignored() -> None:
    reasons = {one.reason for one in regard.check(Tokens(hands_on=False), BATCH).faults}
    assert_sound(Tokens(hands_on=False), BATCH, causal=False, ignore=reasons)
    for left in reasons:
        with pytest.raises(AssertionError):
            assert_sound(Tokens(hands_on=False), BATCH, ignore=reasons - {left})


def test_a_check_that_looked_at_nothing_passes_nothing() -> None:
    with pytest.raises(AssertionError, match="not known to be sound: whether it is causal is not known: tell causal="):
        assert_sound(Tokens(hands_on=True), BATCH)
    with pytest.raises(AssertionError, match="no attention was seen"):
        assert_sound(nn.Linear(4, 4), torch.randn(2, 5, 4), causal=False)
    with regard.watch(Tokens(hands_on=True)) as seen:
        Tokens(hands_on=True)(**BATCH)
    assert "nothing found; no attention was seen" in repr(seen.audit())
    wrong: Any = "no"
    for ask in (lambda: regard.check(Tokens(hands_on=True), BATCH, causal=wrong), lambda: seen.audit(causal=wrong)):
        with pytest.raises(ArgumentError, match="causal= takes True, False or None, got 'no'"):
            ask()


def test_both_doors_take_the_same_words() -> None:
    class Named(Tokens):
        def forward(self, ids: torch.Tensor, attention_mask: Any = None) -> Any:
            return super().forward(ids, torch.ones_like(ids))

    keep = BATCH["attention_mask"].bool()
    checked = regard.check(Named(hands_on=True), {"ids": BATCH["ids"]}, causal=False, padding=keep)
    assert {one.reason for one in checked.errors} >= {"padding"}
    documents = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])
    checked = regard.check(Named(hands_on=True), {"ids": BATCH["ids"]}, causal=False, documents=documents)
    assert {one.reason for one in checked.errors} == {"documents"}


def test_a_model_without_inputs_is_refused_as_by_check() -> None:
    with pytest.raises(ArgumentError, match="give a batch"):
        assert_sound(Tokens(hands_on=True))
