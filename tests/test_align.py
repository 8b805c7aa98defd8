"""Dynamic time warping, against the loops and the filter of transformers' Whisper."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.whisper import generation_whisper

import regard
from regard.errors import ArgumentError, NonFiniteError, NotKeptError, ShapeError
from regard.maps import align
from regard.maps.align import Standardized, dtw

theirs: Any = generation_whisper._dynamic_time_warping
smoothed: Any = generation_whisper._median_filter


def same_path(found: align.Alignment, scores: Tensor) -> None:
    queries, keys = theirs(-scores.double().numpy())
    ours = found.path()
    np.testing.assert_array_equal(ours[0].numpy(), queries)
    np.testing.assert_array_equal(ours[1].numpy(), keys)
    starts = np.concatenate([[True], queries[1:] > queries[:-1]])
    np.testing.assert_array_equal(found.first.numpy(), keys[starts])
    ends = np.concatenate([queries[1:] > queries[:-1], [True]])
    np.testing.assert_array_equal(found.last.numpy(), keys[ends])


@pytest.mark.parametrize("in_blocks", [False, True])
def test_the_path_is_that_of_transformers_with_ties_and_without(
    in_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    for trial in range(150):
        queries, keys = rng.integers(1, 14, 2)
        scores = rng.random((queries, keys)) if trial % 2 else rng.integers(-2, 3, (queries, keys)).astype(float)
        if in_blocks:
            monkeypatch.setattr(align, "BLOCK_NUMBERS", int(rng.integers(1, 5)) * keys)
        same_path(dtw(torch.from_numpy(scores), scores=None), torch.from_numpy(scores))


def heads() -> tuple[regard.AttentionMap, Tensor]:
    torch.manual_seed(0)
    at, frames = torch.linspace(0, 1, 17)[:, None], torch.linspace(0, 1, 53)[:, None]
    q, k = (torch.cat([torch.cos(3 * x), torch.sin(3 * x)], -1) for x in (at, frames))
    q, k = 9 * q + torch.randn(2, 3, 17, 2), k + 0.1 * torch.randn(2, 3, 53, 2)
    weights = regard.map_of(q, k)
    return weights, weights.dense()


def standardized(dense: Tensor, median: int) -> Tensor:
    mean, deviation = dense.mean(-2, keepdim=True), torch.std(dense, dim=-2, keepdim=True, unbiased=False)
    return smoothed((dense - mean) / deviation, median).mean(-3)


@pytest.mark.parametrize("budget", [1 << 23, 3 * 53 * 5])
def test_maps_are_scored_as_whisper_does(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(align, "BLOCK_NUMBERS", budget)
    weights, dense = heads()
    for median in (1, 3, 7):
        scores = standardized(dense, median)
        for found in (dtw(weights, Standardized(median)), dtw(dense, Standardized(median))):
            assert found.first.shape == found.last.shape == (2, 17)
            for sequence in range(2):
                same_path(found[sequence], scores[sequence])
    assert bool((dtw(weights).first.diff() >= 0).all())
    assert 20 < int(dtw(weights)[0].first[-6]) < 53


def test_the_mean_of_heads_and_one_head_alone() -> None:
    weights, dense = heads()
    same_path(dtw(weights, None)[1], dense[1].mean(0))
    same_path(dtw(weights[1, 2], None), dense[1, 2])
    same_path(dtw(weights.only(rows=slice(4, None), columns=slice(40)), None)[0], dense[0, :, 4:, :40].mean(0))


def test_the_edges_are_smoothed_as_there() -> None:
    torch.manual_seed(0)
    for _ in range(40):
        weights = torch.rand(2, 9, 8).softmax(-1)
        same_path(dtw(weights, Standardized(5)), standardized(weights, 5))


def test_a_key_at_which_all_look_alike_says_nothing() -> None:
    torch.manual_seed(0)
    weights = torch.rand(1, 6, 9)
    weights[..., 4] = 0.25
    scores = standardized(weights, 1)
    assert bool(scores.isnan().any())
    queries, keys = dtw(weights, Standardized(1)).path()
    scores = scores.nan_to_num(0.0)
    same = dtw(scores, scores=None).path()
    assert torch.equal(queries, same[0])
    assert torch.equal(keys, same[1])
    found = dtw(torch.ones(1, 1, 5))  # one query
    assert (found.first.tolist(), found.last.tolist()) == ([0], [4])


def test_memory_is_far_below_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs, sums and origins are NumPy's, which tracemalloc counts."""
    monkeypatch.setattr(align, "BLOCK_NUMBERS", 1)
    scores = torch.rand(200, 200)
    tracemalloc.start()
    try:
        dtw(scores, scores=None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < scores.numel() * 8 / 4


def test_what_cannot_be_aligned_is_refused() -> None:
    weights, dense = heads()
    with pytest.raises(ArgumentError, match="odd number of neighbouring keys, got 4"):
        Standardized(4)
    wrong: Any = dense.tolist()
    with pytest.raises(ArgumentError, match="got list"):
        dtw(wrong)
    with pytest.raises(ArgumentError, match="int64"):
        dtw(dense.long())
    for shape in ((5,), (2, 0, 3), (2, 3, 0)):
        with pytest.raises(ShapeError, match="with a query and a key"):
            dtw(torch.rand(shape))
    dense[1, 0, 3, 2] = torch.nan
    with pytest.raises(NonFiniteError, match="queries 0 to 16 are NaN"):
        dtw(dense)
    with pytest.raises(ShapeError, match="that of one map"):
        dtw(weights).path()
    with pytest.raises(ShapeError, match="no other to choose"):
        _ = dtw(weights)[0][0]
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad(), regard.watch(layer, keep="summary") as seen:
        layer(*[torch.rand(1, 4, 8)] * 3)
    with pytest.raises(NotKeptError):
        dtw(seen.maps[0])
