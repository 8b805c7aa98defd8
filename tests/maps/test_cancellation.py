"""Small answers keep their digits: closed forms that cancel are measured from near, or summed without the terms."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.watching.checks.facts import facts_of

T = 2048


@pytest.fixture
def vectors() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, 2, T, 4), torch.randn(1, 2, T, 4)


@pytest.mark.parametrize("ahead", [0, 5])
def test_the_distance_of_a_head_that_looks_at_its_neighbours(vectors: tuple[Tensor, Tensor], ahead: int) -> None:
    q, k = vectors
    i, j = torch.arange(T)[:, None] + ahead, torch.arange(T + ahead)
    near = torch.where(i - j < 2, 0.0, -12.0)[None, None]
    k = F.pad(k, (0, 0, ahead, 0))
    weights = regard.attention(q, k, k, mask=regard.causal(), bias=near, return_weights=True).weights
    expected = (weights.dense().double() * (i - j).abs()).sum(-1)
    torch.testing.assert_close(weights.distance().double(), expected, rtol=1e-5, atol=2e-5)


def test_divergences_of_maps_that_are_almost_equal(vectors: tuple[Tensor, Tensor]) -> None:
    q, k = (x[..., :64, :] for x in vectors)
    one, other = (regard.attention(q * scale, k, k, return_weights=True).weights for scale in (1.0, 1.001))
    p, r = one.dense().double(), other.dense().double()
    cosine = 1 - (p * r).sum(-1) / (p.norm(dim=-1) * r.norm(dim=-1))
    torch.testing.assert_close(regard.divergence(one, other, "cosine").double(), cosine, rtol=1e-2, atol=0)
    m = (p + r) / 2
    js = (torch.xlogy(p, p / m) + torch.xlogy(r, r / m)).sum(-1) / 2
    torch.testing.assert_close(regard.divergence(one, other, "js").double(), js, rtol=1e-2, atol=0)


@pytest.mark.parametrize("has_sink", [False, True])
def test_a_small_share_on_later_positions(vectors: tuple[Tensor, Tensor], has_sink: bool) -> None:
    later = torch.ones(64, 64).triu(1)
    normalization = regard.SoftmaxWithSink(torch.ones(2)) if has_sink else regard.Softmax()

    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            bias = -22 * later[None, None]
            found: Tensor = regard.attention(q, k, k, bias=bias, normalization=normalization)
            return found

    q, k = (x[..., :64, :] for x in vectors)
    with regard.watch(model := Model()) as seen:
        model(q, k)
    expected = float((seen[""].dense().double() * later).sum(-1).mean())
    assert 1e-11 < expected < 1e-8
    assert facts_of(seen.calls[0]).later == pytest.approx(expected, rel=1e-3)
