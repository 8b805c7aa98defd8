"""`regard.map_of`: a map from queries and keys alone."""

from typing import Any

import pytest
import torch
from hypothesis import given

import regard
from regard.errors import ArgumentError, ShapeError
from tests.core.random_calls import Case, cases


@given(case=cases())
def test_it_is_the_map_of_the_call(case: Case) -> None:
    options = case.options()
    expected = regard.attention(*case.tensors(), **options, return_weights=True).weights
    found = regard.map_of(case.query, case.key, **options)
    assert found.shape == expected.shape
    torch.testing.assert_close(found.dense(), expected.dense(), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.entropy(), expected.entropy(), rtol=0, atol=1e-10)


def some(**options: Any) -> tuple[torch.Tensor, torch.Tensor, regard.AttentionMap]:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    return q, k, regard.attention(q, k, k, return_weights=True, **options).weights


def test_a_given_log_sum_exp_is_used() -> None:
    q, k, weights = some(mask=regard.causal())
    shifted = weights.lse.clone()
    shifted[..., 0] += 0.5
    found = regard.map_of(q, k, mask=regard.causal(), lse=shifted)
    torch.testing.assert_close(found.dense()[..., 1:, :], weights.dense()[..., 1:, :])
    torch.testing.assert_close(found[..., 0, :], weights[..., 0, :] * torch.exp(torch.tensor(-0.5)))


@pytest.mark.parametrize(
    "spoil",
    [lambda x: 2 * x, lambda x: x / 0.6931, lambda x: x * torch.nan, lambda x: x.flip(1), lambda x: x + 1000.0],
)
def test_a_log_sum_exp_of_something_else_is_refused(spoil: Any) -> None:
    q, k, weights = some()
    with pytest.raises(ArgumentError, match="does not belong to these queries and keys"):
        regard.map_of(q, k, lse=spoil(weights.lse))


def test_a_log_sum_exp_that_does_not_fit_is_refused() -> None:
    q, k, weights = some()
    with pytest.raises(ShapeError, match=r"of shape \(2, 4, 5\).*got \(4, 5\)"):
        regard.map_of(q, k, lse=weights.lse[0])
    with pytest.raises(ArgumentError, match="only a softmax"):
        regard.map_of(q, k, normalization=regard.Sparsemax(), lse=weights.lse)


def test_a_row_without_a_key_is_no_contradiction() -> None:
    q, k, weights = some(mask=regard.lengths(torch.tensor([0, 7])))
    found = regard.map_of(q, k, mask=regard.lengths(torch.tensor([0, 7])), lse=weights.lse)
    torch.testing.assert_close(found.dense(), weights.dense())


def test_gradients_flow_to_queries_and_keys() -> None:
    q, k, _ = some()
    q, k = q.double().requires_grad_(), k.double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, b: regard.map_of(a, b).entropy(), (q[:1, :2, :2], k[:1, :1, :3]), fast_mode=True
    )
