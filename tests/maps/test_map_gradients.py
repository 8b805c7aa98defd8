"""Gradients of every smooth statistic, and their use as losses."""

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.errors import BackendError


def test_a_learned_bias_takes_gradients_of_statistics() -> None:
    q, k = torch.randn(1, 2, 4, 3, dtype=torch.float64), torch.randn(1, 2, 6, 3, dtype=torch.float64)
    for shape in ((1, 2, 1, 6), (1, 1, 4, 6)):
        bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)

        def read(bias: Tensor, q: Tensor = q, k: Tensor = k) -> Any:
            weights = regard.attention(q, k, k, bias=bias, mask=regard.causal(), return_weights=True).weights
            return weights.entropy(), weights.received(), weights.participation_ratio(), weights.pooled(2, 2)

        assert torch.autograd.gradcheck(read, (bias,), fast_mode=True)


def test_alibi_takes_gradients_of_statistics_in_its_slopes() -> None:
    q, slopes = torch.randn(1, 2, 5, 3, dtype=torch.float64), torch.tensor([0.5, 0.1]).double().requires_grad_()

    def read(q: Tensor, slopes: Tensor) -> Any:
        bias = regard.ALiBi(slopes)
        weights = regard.attention(q, q, q, bias=bias, mask=regard.causal(), return_weights=True).weights
        return weights.entropy(), weights.received(), weights.participation_ratio()

    assert torch.autograd.gradcheck(read, (q.requires_grad_(), slopes), fast_mode=True)


def test_second_derivatives_where_the_backend_has_them() -> None:
    q = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)

    def read(q: Tensor, backend: str) -> Any:
        weights = regard.attention(q, q, q, mask=regard.causal(), backend=backend, return_weights=True).weights
        return weights.entropy().sum() + weights.received().square().sum() + weights.pooled(2, 2).square().sum()

    assert torch.autograd.gradgradcheck(lambda q: read(q, "tiled"), (q,), fast_mode=True)
    with pytest.raises(BackendError, match="no second derivative"):
        torch.autograd.grad(read(q, "fused"), q, create_graph=True)


def test_detached_maps_of_maps_carry_no_gradient_of_their_factors() -> None:
    q, v, d_output = (torch.randn(2, 2, 3, 2, requires_grad=True) for _ in range(3))
    shares = torch.tensor([0.25, 0.75], requires_grad=True)
    weights = regard.attention(q, q, v, return_weights=True).weights.detach()
    maps = [
        weights.average(weights=shares),
        weights.with_values(v).value_norms(),
        weights.with_values(v.detach()).gradient(d_output),
        weights.with_values(v.detach()).attribution(d_output),
    ]
    for one in maps:
        assert one.received().requires_grad
        assert not one.detach().received().requires_grad
        torch.testing.assert_close(one.detach().dense(), one.dense())


@pytest.mark.parametrize("how", ["sum", "mean", "max"])
def test_pictures_of_several_tiles_have_gradients(how: Any) -> None:
    q, k = (torch.randn(1, 2, 150, 4, dtype=torch.float64) for _ in range(2))
    mine, theirs = q.clone().requires_grad_(), q.clone().requires_grad_()
    picture = regard.attention(mine, k, k, return_weights=True).weights.pooled(3, 3, how)
    picture.square().sum().backward()
    blocks = (theirs @ k.mT / 2).softmax(-1).unflatten(-1, (3, 50)).unflatten(-3, (3, 50)).transpose(-2, -3).flatten(-2)
    expected = {"sum": blocks.sum(-1), "mean": blocks.mean(-1), "max": blocks.amax(-1)}[how]
    expected.square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)
