"""Calls for the readers of rows, and the statistics of a map against its dense weights in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.maps.loop import triton_plan
from tests.maps.dense_maps import bins, sums_written_out

USUAL = ("received", "entropy", "top_keys", "pooled_sum", "pooled_mean", "pooled_max", "distance", "top_weight")


BY_LENGTHS: dict[str, Any] = {
    "none": lambda t, s: None,
    "causal": lambda t, s: regard.causal(),
    "causal from the first key": lambda t, s: regard.causal(0),
    "window": lambda t, s: regard.window(20),
    "lengths": lambda t, s: regard.lengths(torch.tensor([s, 0])),
    "causal and lengths": lambda t, s: regard.causal() & regard.lengths(torch.tensor([s, s // 2])),
    "prefix": lambda t, s: regard.prefix(7),
}
"""Masks of two sequences, from the numbers of queries and keys."""
QUERIES, KEYS = 41, 37
MASKS: dict[str, Any] = {
    "none": None,
    "causal": regard.causal(),
    "causal from the first key": regard.causal(0),
    "no key at first": regard.causal(-20),
    "offsets": regard.causal(torch.tensor([3, -4])),
    "window": regard.window(9),
    "window on both sides": regard.window(7, side="both"),
    "lengths": regard.lengths(torch.tensor([0, 33])),
    "lengths per query": regard.lengths(torch.arange(2 * QUERIES).reshape(2, QUERIES) % KEYS, per_query=True),
    "lengths in turns": regard.lengths(
        torch.where(torch.arange(QUERIES) % 2 > 0, KEYS, 5).expand(2, -1), per_query=True
    ),
    "padding": regard.padding(torch.arange(2 * KEYS).reshape(2, KEYS) % 3 > 0),
    "padding of 333": regard.lengths(torch.tensor([0, 333])),
    "prefix": regard.prefix(20),
    "documents": regard.documents(
        torch.arange(QUERIES).expand(2, -1) // 12, key_ids=torch.arange(KEYS).expand(2, -1) // 12
    ),
    "several": regard.causal() & regard.lengths(torch.tensor([36, 20])) & regard.window(15),
}


def made(
    mask: Any = None, dtype: torch.dtype = torch.float32, *, queries: int = QUERIES, keys: int = KEYS, width: int = 11,
    heads: tuple[int, int] = (4, 2), batch: int = 2, size: float = 1.0, **options: Any,
) -> tuple[regard.AttentionMap, Tensor]:  # fmt: skip
    """A map of grouped heads, and its dense weights from the same numbers in float64."""
    torch.manual_seed(0)
    q = (size * torch.randn(batch, heads[0], queries, width)).to(dtype)
    k = torch.randn(batch, keys, heads[1], width).to(dtype).transpose(1, 2)
    precise: dict[str, Any] = {name: one.double() if isinstance(one, Tensor) else one for name, one in options.items()}
    with torch.no_grad():
        weights = regard.map_of(q, k, mask=mask, **options)
        return weights, regard.map_of(q.double(), k.double(), mask=mask, **precise).dense()


@contextmanager
def small_blocks() -> Iterator[None]:
    """Many blocks of few keys in the Triton programs. A plan is kept for the tiles that were there when it was made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_plan, "row_tile", lambda *asked: triton_plan.KernelTile(32, 16, 4))
        patch.setattr(triton_plan, "column_tile", lambda *asked, **how: triton_plan.KernelTile(16, 32, 4))
        patch.setattr(triton_plan, "RANK_TILE", triton_plan.KernelTile(64, 32, 4))
        triton_plan.plan_of.cache_clear()
        yield
    triton_plan.plan_of.cache_clear()


def check(weights: Any, dense: Tensor, *, k: int = 5, rows: int = 5, columns: int = 4, tolerance: float = 1e-6) -> None:
    """Every statistic against float64: to 1e-6, and sums to 1e-6 of the largest sum."""
    with torch.no_grad():
        found: Any = weights.summary(*USUAL, k=k, rows=rows, columns=columns)
    expected = {name: sums for name, sums in sums_written_out(dense, rows, columns).items() if name in USUAL}
    expected |= {"pooled_max": bins(dense, rows, columns, Tensor.amax), "top_weight": dense.amax(-1)}
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
