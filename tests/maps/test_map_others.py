"""Averages, choices, stacks, weights times values: each against the same of the dense weights."""

from typing import Any

import pytest
import torch

import regard
from regard.errors import ArgumentError
from regard.maps import stack
from tests.maps.dense_maps import NORMALIZATIONS, check

OPTIONS: dict[str, Any] = {"tolerance": 1e-12, "k": 2, "rows": 3, "columns": 4, "p": 0.7}


@pytest.mark.parametrize("name", ["softmax", "sink", "sparsemax"])
def test_averages(name: str) -> None:
    q, k = torch.randn(2, 4, 5, 3).double(), torch.randn(2, 2, 7, 3).double()
    mask = regard.causal() & regard.lengths(torch.tensor([7, 0]))
    options: dict[str, Any] = {"normalization": NORMALIZATIONS[name], "mask": mask, "return_weights": True}
    weights = regard.attention(q, k, k, **options).weights
    dense = weights.dense()
    for dim in (-4, -3):
        shares = torch.rand(dense.shape[dim], dtype=torch.float64) + 0.1
        shaped = (shares / shares.sum()).reshape(-1, *[1] * (-dim - 1))
        check(weights.average(dim), dense.mean(dim), **OPTIONS)
        check(weights.average(dim + 4, weights=shares), (dense * shaped).sum(dim), **OPTIONS)
    check(weights.average().average(-3), dense.mean(-3).mean(-3), **OPTIONS)
    check(weights.average()[0], dense.mean(-3)[0], **OPTIONS)
    check(weights.average(0)[-1], dense.mean(0)[-1], **OPTIONS)
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(weights.average() @ x, dense.mean(-3) @ x, rtol=0, atol=1e-12)


def test_an_average_with_weights_below_zero() -> None:
    """Weights of 0 beyond the mask may be the largest, and absolute values are others."""
    q = torch.randn(1, 3, 5, 4)
    weights = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
    one: Any = weights.average(weights=[1.0, -4.0, 2.0])
    dense = -(weights.dense() * torch.tensor([1.0, -4.0, 2.0])[:, None, None]).sum(1)
    for found, expected in (
        (one.dense(), dense), (one.top_keys(1).values[..., 0], dense.amax(-1)),
        (one.argmax(-1), dense.argmax(-1)), (one.topk(5).values, dense.topk(5).values),
        (one.pooled(2, 2, "max")[0, 0, 1], dense[:, :3, 3:].amax()),
        (one.pooled(5, 5, "max"), dense),
    ):  # fmt: skip
        torch.testing.assert_close(found, expected)
    with pytest.raises(ArgumentError, match=r"entropy\(\) reads the weights of a query as shares of a whole"):
        one.entropy()


def test_a_choice_of_one_head_drops_the_dimension() -> None:
    q = torch.randn(2, 3, 4, 5)
    weights = regard.attention(q, q, q, return_weights=True).weights
    assert weights.only(heads=1).shape == (2, 4, 4)
    assert weights.only(heads=[1], rows=2).shape == (2, 1, 1, 4)
    torch.testing.assert_close(weights.only(rows=-1, columns=-2).dense(), weights.dense()[..., -1:, -2:-1])
    assert weights.only() is weights


def test_the_steps_of_a_sliding_window_begin_where_they_are_told() -> None:
    x = torch.randn(2, 4, 9, 5).double()
    starts = (0, 3, 5)
    steps = [regard.attention(*[x[:, :, n : n + 4]] * 3, return_weights=True).weights for n in starts]
    joined = stack(steps, starts=starts)
    pieces = [torch.nn.functional.pad(one.dense(), (n, 5 - n)) for one, n in zip(steps, starts, strict=True)]
    dense = torch.cat(pieces, -2)
    check(joined, dense, **OPTIONS)
    rows, columns = torch.tensor([8, 0, 11]), torch.tensor([0, 7, 4, 8, 3])
    torch.testing.assert_close(joined.block(rows, columns), dense[..., rows, :][..., columns])
    torch.testing.assert_close(joined[..., :3, 6:].dense(), dense[..., :3, 6:])
    with pytest.raises(regard.errors.ArgumentError, match="the place of its first key"):
        stack(steps, starts=(0, 3))


def test_the_largest_of_a_mean_of_gradients_below_zero_is_below_zero() -> None:
    q, v = torch.randn(1, 2, 5, 3), torch.rand(1, 2, 5, 4) + 0.5
    output, weights = regard.attention(q, q, v, mask=regard.causal(), return_weights=True)
    for one in (weights.with_values(v).gradient(-output), weights.with_values(v).attribution(-output)):
        mean = one.average()
        torch.testing.assert_close(mean.dense(), one.dense().mean(1))
        torch.testing.assert_close(mean.top_keys(1).values[..., 0], mean.dense().amax(-1))
        torch.testing.assert_close(mean.pooled(1, 1, "max")[..., 0, 0], mean.dense().amax((-2, -1)))
        stacked = regard.maps.stack([one, one])
        torch.testing.assert_close(
            stacked.pooled(2, 1, "max"), stacked.dense().unflatten(-2, (2, 5)).amax((-2, -1))[..., None]
        )


def test_the_gradient_of_an_output_in_bfloat16() -> None:
    q, v = torch.randn(1, 2, 5, 3).bfloat16(), torch.randn(1, 2, 5, 4).bfloat16()
    weights = regard.attention(q, q, v, keep_values=True, return_weights=True).weights
    found = weights.gradient(torch.ones(1, 2, 5, 4).bfloat16()).dense()
    torch.testing.assert_close(found, v.float().sum(-1)[:, :, None].expand(1, 2, 5, 5))


def test_a_map_without_heads_gets_one_after_its_sequences() -> None:
    q = torch.randn(3, 5, 4)
    weights = regard.attention(q, q, q, return_weights=True).weights
    assert weights.with_heads().shape == (3, 1, 5, 5)
    assert torch.equal(weights.with_heads().dense()[:, 0], weights.dense())
    assert torch.equal(weights.with_heads().average().dense(), weights.dense())


def test_values_are_kept_where_that_is_asked() -> None:
    q, k = torch.randn(2, 4, 5, 3), torch.randn(2, 2, 5, 3)
    plain = regard.attention(q, k, k, return_weights=True)
    output, weights = regard.attention(q, k, k, return_weights=True, keep_values=True)
    assert torch.equal(output, plain.output)
    expected = plain.weights.with_values(k)
    assert torch.equal(weights.value_norms().dense(), expected.value_norms().dense())
    torch.testing.assert_close(weights[1].value_norms().dense(), weights.value_norms().dense()[1])
    assert torch.equal(weights[0].attribution(output[0]).dense(), expected[0].attribution(output[0]).dense())
    assert (
        regard.attention(q[0, 0], k[0, 0], k[0, 0], return_weights=True, keep_values=True).weights.value_norms().shape
    )
    with pytest.raises(regard.errors.ArgumentError, match="return_weights=True asks for"):
        regard.attention(q, k, k, keep_values=True)


def test_repr_of_a_map_of_maps_says_what_it_is_of() -> None:
    q = torch.zeros(2, 3, 4, 5)
    weights = regard.attention(q, q, q, return_weights=True).weights
    average = repr(weights.average())
    assert average.startswith("AttentionMap(2, 4, 4) float32 on cpu: the mean over 3 of a map (2, 3, 4, 4): softmax of")
    assert "2 steps; holds 2.1 KiB, dense() would take 768 B" in repr(stack([weights, weights]))
    assert "the transpose of a map (2, 3, 4, 4)" in repr(weights.mT)
    assert weights.mT.shape == (2, 3, 4, 4)
    assert weights.mT.mT.source is weights.source
