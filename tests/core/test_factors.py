"""Factors of a dot product that are 0 or negative: torch's kernels give NaN for them under causality."""

import pytest
import torch

import regard
from tests import each_once

MASKS = {
    "causal": regard.causal(),
    "causal(0)": regard.causal(0),
    "causal, one offset a sequence": regard.causal(torch.tensor([0, 2])),
    "causal & lengths": regard.causal() & regard.lengths(torch.tensor([2, 5])),
    "window": regard.window(2),
    "window, one offset a sequence": regard.window(2, offset=torch.tensor([0, 2])),
    "none": None,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    ("factor", "lengths", "dtype"),
    each_once([-1.0, -0.3, 0.0, 0.5], [(6, 6), (3, 6), (6, 3)], [torch.float32, torch.float64]),
)
def test_any_factor_is_as_the_reference_has_it(
    mask: regard.Mask | None, factor: float, lengths: tuple[int, int], dtype: torch.dtype
) -> None:
    queries, keys = lengths
    q = torch.randn(2, 2, queries, 4, dtype=dtype, requires_grad=True)
    k = torch.randn(2, 2, keys, 4, dtype=dtype, requires_grad=True)
    v, x = torch.randn(2, 2, keys, 3, dtype=dtype), torch.randn(2, 2, queries, 3, dtype=dtype)
    score = regard.ScaledDot(factor)
    output, weights = regard.attention(q, k, v, score=score, mask=mask, return_weights=True)
    expected, reference = regard.attention(q, k, v, score=score, mask=mask, return_weights=True, backend="reference")
    dense = reference.dense()
    pairs = [
        (output, expected),
        (weights.dense(), dense),
        (weights.received(), dense.sum(-2)),
        (weights.mT @ x, dense.mT @ x),
        (weights.average().received(), dense.mean(1, keepdim=True).sum(-2).view_as(weights.average().received())),
        (weights.entropy(), -torch.special.xlogy(dense, dense).sum(-1)),
    ]
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=2e-5)
    weigh = torch.randn_like(output)
    for got, wanted in zip(*(torch.autograd.grad(o, (q, k), weigh) for o in (output, expected)), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(("heads", "queries", "keys"), [(2, 2, 1), (4, 5, 3), (4, 1, 3), (1, 5, 3)])
@pytest.mark.parametrize(("factor", "groups"), [(-1.0, 1), (0.7, None)])
@pytest.mark.parametrize("mask", [None, regard.causal(0)], ids=str)
@pytest.mark.parametrize("is_image", [False, True])
def test_gradients_of_heads_one_number_wide(
    is_image: bool, mask: regard.Mask | None, groups: int | None, heads: int, queries: int, keys: int, factor: float
) -> None:
    """Heads beside one another, of one number each, may be read as an image whose channels come last.

    torch then puts what it computes of them into memory of that kind, which the kernels do not read.
    """

    def beside(heads: int, length: int) -> torch.Tensor:
        made = torch.randn(2, length, heads, 1, dtype=torch.float64).transpose(1, 2).detach()
        return (made.to(memory_format=torch.channels_last) if is_image else made).requires_grad_()

    q, k, v = beside(heads, queries), beside(groups or heads, keys), beside(groups or heads, keys)
    output, weights = regard.attention(q, k, v, score=regard.ScaledDot(factor), mask=mask, return_weights=True)
    key, value = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = factor * q @ key.mT
    if mask is not None:
        scores = scores.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(), -torch.inf)
    dense = scores.softmax(-1)
    for got, wanted in ((output, dense @ value), (weights.received(), dense.sum(-2)), (weights.dense(), dense)):
        torch.testing.assert_close(got, wanted)
        weigh = torch.randn_like(wanted)
        found, right = (
            torch.autograd.grad((one * weigh).sum(), (q, k), retain_graph=True, allow_unused=True)
            for one in (got, wanted)
        )
        for mine, exact in zip(found, right, strict=True):
            torch.testing.assert_close(mine, exact, atol=1e-12, rtol=1e-9)
