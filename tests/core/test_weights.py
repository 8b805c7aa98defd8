"""AttentionMap: what indexing means, what it refuses, what it says of itself."""

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import regard
from regard.errors import ArgumentError, ShapeError, TooLargeError
from tests.core.random_calls import Case, cases


@pytest.fixture
def weights() -> regard.AttentionMap:
    q, k = torch.randn(2, 4, 5, 3, dtype=torch.float64), torch.randn(2, 2, 7, 3, dtype=torch.float64)
    mask = regard.causal() & regard.lengths(torch.tensor([7, 4]))
    bias = torch.randn(2, 4, 1, 7, dtype=torch.float64)
    return regard.attention(q, k, k, mask=mask, bias=bias, return_weights=True).weights


@pytest.mark.parametrize("rows", [range(0, 6), range(-1, 2), range(4, 0, -1), torch.tensor([5]), torch.tensor([-6])])
def test_a_block_beyond_the_map_is_refused(weights: regard.AttentionMap, rows: range | Tensor) -> None:
    with pytest.raises(ShapeError, match="got"):
        weights.block(rows, range(7))


def test_points_are_in_range(weights: regard.AttentionMap) -> None:
    ones = torch.ones(3, dtype=torch.long)
    for place in range(4):
        given = [ones * 99 if n == place else ones for n in range(4)]
        with pytest.raises(ShapeError, match=rf"index must be in \[-{weights.shape[place]}, {weights.shape[place]}\)"):
            weights[tuple(given)]


def test_products_take_values_for_groups_and_for_heads(weights: regard.AttentionMap) -> None:
    dense = weights.dense()
    for x in (
        torch.randn(7, 9, dtype=torch.float64),
        torch.randn(2, 4, 7, 2, dtype=torch.float64),
        torch.randn(4, 7, 2, dtype=torch.float64),
    ):
        torch.testing.assert_close(weights @ x, dense @ x, rtol=0, atol=1e-12)
    groups = torch.randn(2, 2, 7, 5, dtype=torch.float64)
    torch.testing.assert_close(weights @ groups, dense @ groups.repeat_interleave(2, 1), rtol=0, atol=1e-12)


def test_the_map_does_not_keep_the_values_alive() -> None:
    import gc
    import weakref

    q, value = torch.randn(5, 4), torch.randn(5, 4)
    alive = weakref.ref(value)
    weights = regard.attention(q, q, value, return_weights=True).weights
    del value
    gc.collect()
    assert alive() is None
    assert weights.shape == (5, 5)


def test_dense_refuses_above_the_limit_and_says_the_cost() -> None:
    q = torch.randn(1, 2, 20_000, 2)
    weights = regard.attention(q, q, q, return_weights=True).weights
    with pytest.raises(TooLargeError, match=r"take 3.0 GiB, above the limit of 1.0 GiB"):
        weights.dense()
    with pytest.raises(TooLargeError, match=r"above the limit of 1.0 KiB"):
        weights.dense(limit_bytes=1024)
    with pytest.raises(TooLargeError):
        weights.block(range(5), range(10), limit_bytes=2 * 5 * 10 * 4 - 1)
    assert weights[0, 0, 19_999].shape == (20_000,)


def test_repr_says_what_it_is_and_what_dense_would_cost(weights: regard.AttentionMap) -> None:
    assert repr(weights) == (
        "AttentionMap(2, 4, 5, 7) float64 on cpu: softmax of scaled dot product, causal & lengths, with a bias; "
        "holds 1.9 KiB, dense() would take 2.2 KiB"
    )


def test_a_choice_of_a_choice_of_heads_keeps_what_each_head_has_for_its_own() -> None:
    q, k = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(2, 3, 6, 5, dtype=torch.float64)
    own, x = torch.rand(3, dtype=torch.float64) + 0.5, torch.randn(6, 2, dtype=torch.float64)
    mask = regard.causal() & regard.lengths(torch.tensor([6, 2]))
    for options in ({"score": regard.call.scores.Laplacian(own)}, {"normalization": regard.SoftmaxWithSink(own)}):
        weights = regard.attention(q, k, k, mask=mask, return_weights=True, **options).weights
        chosen, dense = weights[1][1:], weights.dense()[1][1:]
        torch.testing.assert_close(chosen.dense(), dense, rtol=0, atol=1e-14)
        torch.testing.assert_close(chosen @ x, dense @ x, rtol=0, atol=1e-14)


def test_a_block_takes_what_an_index_takes(weights: Any) -> None:
    dense, columns = weights.dense(), [True, False, True, False, True, False, True]
    assert torch.equal(weights.block([1, -1], columns), dense[..., [1, -1], :][..., columns])
    assert torch.equal(weights.block(slice(1, 4, 2), slice(None, 3)), dense[..., 1:4:2, :3])
    assert torch.equal(weights.block(2, -1), dense[..., 2:3, 6:7])
    for wrong in ([5], [0.5], "1", None):
        with pytest.raises(ShapeError, match="query index"):
            weights.block(wrong, range(2))


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
