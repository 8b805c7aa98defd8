"""Gradients of every smooth statistic, and what they are good for as losses."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import regard
from regard.errors import BackendError
from tests.core.random_calls import Case, cases
from tests.maps.dense_maps import NORMALIZATIONS, sums_asked, sums_written_out

CALLS: dict[str, Any] = {
    "grouped, causal, padded": {"mask": regard.causal() & regard.lengths(torch.tensor([0, 5]))},
    "everything": {},
    "causal from the start": {"mask": regard.causal(0)},
    "window, bias per key": {"mask": regard.window(2), "bias": torch.randn(2, 1, 1, 6).double()},
    "dense bias": {"bias": torch.randn(2, 4, 4, 6).double(), "mask": regard.lengths(torch.tensor([3, 6]))},
    "sink": {"normalization": regard.SoftmaxWithSink(torch.tensor([0.3, -1.0, 0.5, 2.0]).double())},
    "additive": {"score": regard.Additive(torch.randn(3).double())},
    "sigmoid": {"normalization": regard.Sigmoid(), "mask": regard.causal()},
    "tiled by name": {"backend": "tiled", "mask": regard.causal(0) & regard.padding(torch.arange(6) % 2 == 0)},
}
STATISTICS = {
    "received": lambda w: w.received(),
    "received mean": lambda w: w.received("mean"),
    "entropy": lambda w: w.entropy(),
    "participation_ratio": lambda w: w.participation_ratio(),
    "expected": lambda w: w.expected(torch.arange(6).double().sin()),
    "distance": lambda w: w.distance(),
    "pooled": lambda w: w.pooled(2, 3),
    "top_weight": lambda w: w.top_weight(),
    "top_keys": lambda w: w.top_keys(2).values,
    "product": lambda w: w @ torch.arange(12).double().cos().reshape(6, 2),
    "transposed": lambda w: w.mT @ torch.arange(8).double().cos().reshape(4, 2),
    "average": lambda w: w.average(weights=[1, 2, 3, 4]).entropy(),
    "average received": lambda w: w.average(0).received(),
    "selection": lambda w: w.only(heads=[1, 2], rows=slice(1, 4), columns=torch.tensor([5, 0])).received(),
    "one head": lambda w: w[1, 2].received() + w[1, 2].expected(torch.arange(6.0)).sum(),
}


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("call", CALLS)
def test_gradcheck(call: str, statistic: str) -> None:
    torch.manual_seed(3)
    q, k = torch.randn(2, 4, 4, 3, dtype=torch.float64), torch.randn(2, 2, 6, 3, dtype=torch.float64)

    def read(q: Tensor, k: Tensor) -> Any:
        return STATISTICS[statistic](regard.attention(q, k, k, return_weights=True, **CALLS[call]).weights)

    assert torch.autograd.gradcheck(read, (q.requires_grad_(), k.requires_grad_()), fast_mode=True)


@pytest.mark.parametrize("name", ["softmax", "sink", "sparsemax", "unnormalized"])
@settings(max_examples=25)
@given(case=cases(scores=("dot", "scaled", "gaussian", "additive")))
def test_gradients_are_those_of_the_formula(name: str, case: Case) -> None:
    """A random mixture of the sums, through the lazy map and through the dense one; dead rows stay finite."""
    case = case.to(torch.float64)
    options: dict[str, Any] = {**case.options(), "normalization": NORMALIZATIONS[name], "return_weights": True}
    lazy = regard.attention(*case.tensors(), **options).weights
    dense = regard.attention(*case.tensors(), backend="reference", **options).weights.dense()
    ours, theirs = sums_asked(lazy, 3, 4), sums_written_out(dense, 3, 4)
    x = torch.randn(dense.shape[-2], 2, dtype=torch.float64)
    ours["transposed"], theirs["transposed"] = lazy.mT @ x, dense.mT @ x
    mixture = {name: torch.randn_like(value) for name, value in theirs.items()}
    inputs = (case.query, case.key)
    (gradient, expected) = (
        torch.autograd.grad([(mixture[n] * found[n]).sum() for n in mixture], inputs, allow_unused=True)
        for found in (ours, theirs)
    )
    for one, other in zip(gradient, expected, strict=True):
        assert one.isfinite().all()
        bound = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9 * bound)


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


def test_a_detached_map_carries_no_gradient() -> None:
    q = torch.randn(1, 1, 3, 2, requires_grad=True)
    weights = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
    for read in STATISTICS_WITHOUT_SHAPE:
        assert read(weights).requires_grad
        assert not read(weights.detach()).requires_grad
    with torch.no_grad():
        assert not weights.entropy().requires_grad


def test_a_map_made_without_gradients_carries_none() -> None:
    q, vector = torch.randn(3, 2, requires_grad=True), torch.randn(2, requires_grad=True)
    with torch.no_grad():
        maps = [regard.map_of(q, q), regard.attention(q, q, q, return_weights=True).weights]
        maps.append(regard.map_of(q.detach(), q.detach(), score=regard.Additive(vector)))
    assert [weights.dense().requires_grad for weights in maps] == [False] * len(maps)
    assert [weights.entropy().requires_grad for weights in maps] == [False] * len(maps)


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


STATISTICS_WITHOUT_SHAPE = [
    lambda w: w.received(),
    lambda w: w.entropy(),
    lambda w: w.pooled(2, 2),
    lambda w: w.top_keys(1).values,
    lambda w: w.mT @ torch.ones(3, 1),
]


# -- three losses ------------------------------------------------------------------------------------------


def descend(
    parameters: Sequence[Tensor], loss: Callable[[], Tensor], steps: int = 60, rate: float = 0.1
) -> tuple[float, float]:
    optimizer = torch.optim.Adam(parameters, lr=rate)
    first = float(loss().detach())
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return first, float(loss().detach())


def projected(
    mask: regard.Mask | None = None, length: int = 12
) -> tuple[tuple[Tensor, Tensor], Callable[[], regard.AttentionMap]]:
    """Attention whose query and key projections are to be learned, as a function that gives its map."""
    x = torch.randn(2, 3, length, 8)
    w_q, w_k = (torch.nn.Parameter(torch.randn(8, 8) / 8**0.5) for _ in range(2))
    return (w_q, w_k), lambda: regard.attention(x @ w_q, x @ w_k, x, mask=mask, return_weights=True).weights


def test_entropy_as_a_regularizer_keeps_attention_spread() -> None:
    """Heads whose attention collapses onto one key train badly (Zhai et al. 2023, arXiv:2303.06296)."""
    parameters, weights = projected()
    with torch.no_grad():
        parameters[0].mul_(6.0)
    floor = 0.9 * torch.log(torch.tensor(12.0))
    before, after = descend(parameters, lambda: (floor - weights().entropy()).clamp_min(0.0).mean())
    assert before > 0.5
    assert after < 0.05


def test_guided_alignment_follows_a_diagonal() -> None:
    """Attention of a speech synthesiser is pulled to the diagonal (Tachibana et al. 2017, arXiv:1710.08969)."""
    query, key = (torch.nn.Parameter(0.1 * torch.randn(1, 1, n, 16)) for n in (10, 20))
    i, j = torch.arange(10) / 10, torch.arange(20) / 20

    def weights() -> regard.AttentionMap:
        return regard.attention(query, key, key, return_weights=True).weights

    def loss() -> Tensor:
        # sum_j P_ij (i/T - j/S)^2 is a sum of three means, so that no T x S penalty is made.
        mean, square = weights().expected(torch.stack([j, j.square()], -1)).unbind(-1)
        return (i.square() - 2 * i * mean + square).mean()

    before, after = descend((query, key), loss, steps=150)
    assert before > 0.05
    assert after < 0.01
    assert (weights().expected(j)[0, 0] - i).abs().max() < 0.1


def test_coverage_spreads_what_the_keys_receive() -> None:
    """Every source word is to be read about once (Tu et al. 2016, arXiv:1601.04811)."""
    query, key = (torch.nn.Parameter(torch.randn(2, 2, 12, 8)) for _ in range(2))
    mask = regard.lengths(torch.tensor([12, 7]))

    def loss() -> Tensor:
        received = regard.attention(query, key, key, mask=mask, return_weights=True).weights.received()
        fair = (torch.arange(12) < torch.tensor([[12], [7]])) * 12 / torch.tensor([[12.0], [7.0]])
        return (received - fair[:, None]).square().mean()

    before, after = descend((query, key), loss)
    assert before > 0.1
    assert after < 1e-3


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
