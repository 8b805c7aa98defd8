"""Factors of a dot product that are 0 or negative: torch's kernels give NaN for them under causality."""

import pytest
import torch

import regard

MASKS = {
    "causal": regard.causal(),
    "causal(0)": regard.causal(0),
    "causal, one offset a sequence": regard.causal(torch.tensor([0, 2])),
    "causal & lengths": regard.causal() & regard.lengths(torch.tensor([2, 5])),
    "window": regard.window(2),
    "none": None,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("factor", [-1.0, -0.3, 0.0, 0.5])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 6), (6, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_factor_is_as_the_reference_has_it(
    mask: regard.Mask | None, factor: float, queries: int, keys: int, dtype: torch.dtype
) -> None:
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
