"""Mixtures of experts against a loop over tokens."""

from typing import Any

import pytest
import torch
from torch import nn

from regard.errors import ArgumentError
from regard.nn import MixtureOfExperts, SigmoidRouter, SoftmaxRouter

GROUPED = {"groups": 3, "best_groups": 2}


def _weights_by_hand(router: Any, x: torch.Tensor, is_softmax: bool) -> dict[int, torch.Tensor]:
    """From an expert to its weight for one token."""
    logits = router.logits(x)
    scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
    shifted = scores if is_softmax else scores + router.offset
    groups = shifted.view(router.groups, -1)
    best = groups.amax(-1) if is_softmax else groups.sort(-1).values[:, -2:].sum(-1)
    kept = best.sort(descending=True).indices[: router.best_groups].tolist()
    size = groups.shape[1]
    candidates = [expert for group in kept for expert in range(group * size, group * size + size)]
    chosen = sorted(candidates, key=lambda expert: -shifted[expert].item())[: router.most]
    total = sum(scores[expert] for expert in chosen) if router.is_normalised else 1.0
    return {expert: router.scale * scores[expert] / total for expert in chosen}


@pytest.mark.parametrize("kind", [SoftmaxRouter, SigmoidRouter])
@pytest.mark.parametrize("options", [{}, GROUPED, {"is_normalised": False, "scale": 2.5}, {**GROUPED, "scale": 0.5}])
def test_output_and_gradients_are_those_of_a_loop(kind: Any, options: dict[str, Any]) -> None:
    router = kind(4, 9, most=2, **options)
    if kind is SigmoidRouter:
        router.offset.copy_(torch.rand(9))
    mixture = MixtureOfExperts(router, [nn.Linear(4, 4) for _ in range(9)], nn.Linear(4, 4))
    assert mixture.shared is not None
    x = torch.randn(2, 5, 4, requires_grad=True)
    rows = []
    for token in x.flatten(0, 1):
        weights = _weights_by_hand(router, token, kind is SoftmaxRouter)
        rows.append(mixture.shared(token) + sum(w * mixture.experts[e](token) for e, w in weights.items()))
    exact, ours = torch.stack(rows).view_as(x), mixture(x)
    torch.testing.assert_close(ours, exact)
    wanted = (x, router.logits.weight, *mixture.shared.parameters())
    got, right = (torch.autograd.grad(one.square().sum(), wanted) for one in (ours, exact))
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [({"groups": 2}, "9 experts must divide into 2 groups"), ({"most": 10}, "10 of them"), ({"most": 0}, "at least 1")],
)
def test_sizes_that_do_not_fit(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        SoftmaxRouter(4, 9, **{"most": 2, **sizes})
