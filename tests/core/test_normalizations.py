"""Normalizations against their formulas and the entmax package, on every backend that runs them."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.call.normalizations import Normalization
from tests.core.random_calls import EVERYDAY
from tests.fuzz.core.normalizations import softmax_of

entmax = pytest.importorskip("entmax")


def sparse_by_package(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    def normalize(scores: Tensor) -> Tensor:
        dead = (scores == -torch.inf).all(-1, keepdim=True)
        # The package takes no -inf: a score far below every other has the weight 0 too.
        weights = function(scores.masked_fill(scores == -torch.inf, -1e6), dim=-1)
        return weights.masked_fill(dead, 0.0)

    return normalize


def softpick_by_hand(scores: Tensor) -> Tensor:
    """Equation 3 of arXiv:2504.20966 without its shift by the row's largest score."""
    risen = torch.where(scores == -torch.inf, 0.0, scores.exp() - 1)
    total = risen.abs().sum(-1, keepdim=True)
    return risen.relu() / torch.where(total > 0, total, 1.0)


NORMALIZATIONS = {
    "sink": (regard.SoftmaxWithSink(), lambda s: softmax_of(s, torch.zeros(()))),
    "sigmoid": (regard.Sigmoid(-1.0), lambda s: torch.sigmoid(s - 1)),
    "unnormalized": (regard.call.normalizations.Unnormalized(), torch.exp),
    "softpick": (regard.call.normalizations.Softpick(), softpick_by_hand),
    "sparsemax": (regard.Sparsemax(), sparse_by_package(entmax.sparsemax)),
    "entmax": (regard.Entmax15(), sparse_by_package(entmax.entmax15)),
}


@pytest.mark.parametrize("name", ["sparsemax", "entmax"])
def test_many_equal_keys_just_beyond_the_support_have_no_weight(name: str) -> None:
    """Their mean is near the threshold of a larger support, and their spread is 0."""
    normalization, by_hand = NORMALIZATIONS[name]
    for depth, count in product((1.0, 2.0, 4.0, 8.0), (2, 3, 30)):
        scores = torch.tensor([[0.0, *[-depth] * count]], dtype=torch.float64)
        weights = regard.map_of(
            torch.ones(1, 1, dtype=torch.float64), scores.mT, score=regard.Dot(), normalization=normalization
        )
        torch.testing.assert_close(weights.dense(), by_hand(scores), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", EVERYDAY)
def test_one_sink_in_a_tensor_of_any_shape_is_that_of_all_heads(backend: str) -> None:
    q, k = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 6, 5)
    found = [
        regard.attention(
            q, k, k, normalization=regard.SoftmaxWithSink(sink), mask=regard.causal(), backend=backend,
            return_weights=True,
        )
        for sink in (0.5, torch.tensor(0.5), torch.tensor([0.5]))
    ]  # fmt: skip
    for output, weights in found[1:]:
        torch.testing.assert_close(output, found[0].output, rtol=0, atol=1e-6)
        for one, other in ((weights, found[0].weights), (weights[:, 1], found[0].weights[:, 1])):
            torch.testing.assert_close(one.dense(), other.dense(), rtol=0, atol=1e-6)
            torch.testing.assert_close(one.top_keys(1).values, other.top_keys(1).values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("normalization", [regard.Softmax(), regard.Sparsemax(), regard.Entmax15()], ids=str)
def test_scores_far_from_zero_lose_no_more_than_their_threshold(normalization: Normalization) -> None:
    """Eighths, to which float32 can add 128 exactly. The threshold is rounded to 8e-6; squares would cancel."""
    scores = torch.randint(-16, 16, (50, 9)) / 8
    near, _ = normalization.normalize(scores)
    far, _ = normalization.normalize(scores + 128)
    torch.testing.assert_close(far, near, rtol=0, atol=3e-5)
    torch.testing.assert_close(far.sum(-1), torch.ones(50), rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", [None, "tiled", "reference"])
@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_gradients_of_scores_that_are_whole_numbers(name: str, backend: str | None) -> None:
    """Of four scores 0, 0, -2, -2 the spread is exactly that of entmax's threshold, whose root has no derivative."""
    normalization, by_hand = NORMALIZATIONS[name]
    rows = torch.tensor(list(product((0.0, -1.0, -2.0), repeat=5)), dtype=torch.float64)
    bias, keep = rows.clone().requires_grad_(), torch.rand(rows.shape) > 0.3 * torch.arange(5).clamp(max=1)
    q, k = torch.zeros(1, 1, len(rows), 2, dtype=torch.float64), torch.zeros(1, 1, 5, 2, dtype=torch.float64)
    v = torch.randn(1, 1, 5, 3, dtype=torch.float64)
    options: dict[str, Any] = {"bias": bias[None, None], "normalization": normalization, "backend": backend}
    output, weights = regard.attention(q, k, v, mask=keep, **options, return_weights=True)
    expected = by_hand(bias.masked_fill(~keep, -torch.inf))
    for ours, theirs in ((output, expected @ v), (weights.dense(), expected[None, None])):
        weigh = torch.randn_like(ours)
        mine, right = (torch.autograd.grad((one * weigh).sum(), bias, retain_graph=True)[0] for one in (ours, theirs))
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-10)
