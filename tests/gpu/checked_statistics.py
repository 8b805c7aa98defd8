"""The statistics of a map against its dense weights in float64."""

from typing import Any

import torch
from torch import Tensor

from tests.maps.dense_maps import bins

USUAL = ("received", "entropy", "top_keys", "pooled_sum", "pooled_mean", "pooled_max", "distance", "top_weight")


def check(weights: Any, dense: Tensor, *, k: int = 5, rows: int = 5, columns: int = 4, tolerance: float = 1e-6) -> None:
    """Every statistic against float64: to 1e-6, and sums to 1e-6 of the largest sum."""
    with torch.no_grad():
        found: Any = weights.summary(*USUAL, k=k, rows=rows, columns=columns)
    positive = torch.where(dense > 0, dense, 1.0)
    places = torch.arange(dense.shape[-2])[:, None] + dense.shape[-1] - dense.shape[-2]
    expected = {
        "received": dense.sum(-2),
        "entropy": -(dense * positive.log()).sum(-1),
        "pooled_sum": bins(dense, rows, columns, Tensor.sum),
        "pooled_mean": bins(dense, rows, columns, Tensor.mean),
        "pooled_max": bins(dense, rows, columns, Tensor.amax),
        "distance": (dense * (places - torch.arange(dense.shape[-1])).abs()).sum(-1),
        "top_weight": dense.amax(-1),
    }
    for name, theirs in expected.items():
        error = float((found[name].double() - theirs).abs().max())
        assert error <= tolerance * max(1.0, float(theirs.max())), (name, error)
    values, indices = found["top_keys"]
    assert indices.max() < dense.shape[-1]
    torch.testing.assert_close(values.double(), dense.topk(k).values, rtol=0, atol=tolerance)
    assert ((indices == -1) == (values == 0)).all()
    there = torch.where(indices >= 0, dense.gather(-1, indices.clamp_min(0)), 0.0)
    torch.testing.assert_close(values.double(), there, rtol=0, atol=tolerance)
    assert torch.equal(values[..., 0], found["top_weight"])
