"""`AdditiveAttention` against the formula written out in float64, pair by pair."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.errors import ArgumentError, ShapeError
from regard.nn import AdditiveAttention


def written_out(module: AdditiveAttention, query: Tensor, key: Tensor, value: Tensor, valid: int) -> tuple[Any, ...]:
    """Output and weights of one query (Dq,), keys (S, Dk) and values (S, E); Bahdanau et al. 2015, A.1.2."""
    scores = [
        sum(
            v * torch.tanh(w_q @ query + w_k @ key[j])
            for v, w_q, w_k in zip(module.vector, module.query_weight, module.key_weight, strict=True)
        )
        for j in range(valid)
    ]
    exponentials = [torch.exp(s) for s in scores]
    weights = torch.zeros(len(key), dtype=torch.float64)
    for j, e in enumerate(exponentials):
        weights[j] = e / sum(exponentials)
    return sum((w * v for w, v in zip(weights, value, strict=True)), torch.zeros_like(value[0])), weights


@settings(max_examples=20)
@given(valid=st.lists(st.integers(0, 5), min_size=2, max_size=2), seed=st.integers(0, 99))
def test_equals_the_formula(valid: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    module = AdditiveAttention(3, 7, 11).double()
    query, key, value = (
        torch.randn(2, n, d, dtype=torch.float64) for n, d in ((2, 3), (5, 7), (5, 4))
    )  # fmt: skip
    with torch.no_grad():
        output, weights = module(query, key, value, mask=regard.lengths(torch.tensor(valid)), return_weights=True)
        for b in range(2):
            for i in range(2):
                expected, row = written_out(module, query[b, i], key[b], value[b], valid[b])
                torch.testing.assert_close(output[b, i], expected, rtol=0, atol=1e-12)
                torch.testing.assert_close(weights[b, i], row, rtol=0, atol=1e-12)


def test_the_value_is_the_key_unless_given() -> None:
    module = AdditiveAttention(3, 7, 11)
    query, key = torch.randn(2, 2, 3), torch.randn(2, 5, 7)
    assert torch.equal(module(query, key), module(query, key, key))


def test_dropout_only_in_training() -> None:
    module = AdditiveAttention(3, 7, 11, dropout=0.5)
    query, key = torch.randn(2, 2, 3), torch.randn(2, 5, 7)
    assert not torch.equal(module(query, key), module(query, key))
    module.eval()
    assert torch.equal(module(query, key), module(query, key))


def test_bad_arguments() -> None:
    module = AdditiveAttention(3, 7, 11)
    with pytest.raises(ShapeError, match="query of width 3, got 4"):
        module(torch.randn(2, 2, 4), torch.randn(2, 5, 7))
    with pytest.raises(ShapeError, match="key must be 7 wide, got 6"):
        module(torch.randn(2, 2, 3), torch.randn(2, 5, 6))
    with pytest.raises(ArgumentError, match="key_dim must be at least 1, got 0"):
        AdditiveAttention(3, 0, 11)
    with pytest.raises(ArgumentError, match=r"dropout must be in \[0, 1\), got -0.1"):
        AdditiveAttention(3, 7, 11, dropout=-0.1)
