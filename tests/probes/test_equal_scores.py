"""Equal scores give equal weights, as a mask that leaves no key does; the scores tell them apart."""

import pytest
import torch

import regard
from tests.modules import module


@pytest.mark.parametrize("hides", [None, -torch.inf, torch.finfo().min])
def test_rows_of_equal_scores_have_their_keys(hides: float | None) -> None:
    def mix(_: object, x: torch.Tensor) -> torch.Tensor:
        scores = 0 * x @ x.mT
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return (scores if hides is None else scores.masked_fill(later, hides)).softmax(-1) @ x

    checked = regard.check(module(mix)(), torch.randn(2, 6, 4), causal=True)
    assert {one.reason for one in checked} == ({"future"} if hides is None else set()), str(checked)
