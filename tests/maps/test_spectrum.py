"""Singular values against the dense decomposition, and the bound that comes with them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.maps.statistics.spectrum import _norm_of_residual
from tests.core.random_calls import Case, cases


def within(spectrum: Any, exact: Any, slack: float) -> None:
    assert (spectrum.values <= exact + slack).all()
    assert (exact <= spectrum.values + spectrum.error + slack).all()
    assert (spectrum.error >= 0).all()


@settings(max_examples=25)
@given(case=cases(), data=st.data())
def test_every_call(case: Case, data: st.DataObject) -> None:
    case = case.to(torch.float64)
    weights = regard.attention(*case.tensors(), **case.options(), return_weights=True).weights
    exact = torch.linalg.svdvals(weights.detach().dense())
    k = data.draw(st.integers(1, exact.shape[-1]))
    spectrum = weights.singular_values(k, iterations=data.draw(st.integers(0, 3)), seed=data.draw(st.integers(0, 9)))
    within(spectrum, exact[..., :k], 1e-12)
    assert not spectrum.values.requires_grad


@pytest.mark.parametrize("mask", [None, regard.causal(), regard.window(10)], ids=str)
@pytest.mark.parametrize("sharp", [0.5, 3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_long_maps(dtype: torch.dtype, sharp: float, mask: regard.Mask | None) -> None:
    """Spectra that fall quickly and spectra that are flat: the bound holds, and says which it was."""
    q, k = sharp * torch.randn(1, 3, 160, 8, dtype=torch.float64), torch.randn(1, 3, 160, 8, dtype=torch.float64)
    weights = regard.attention(q.to(dtype), k.to(dtype), k.to(dtype), mask=mask, return_weights=True).weights
    dense = regard.attention(q, k, k, mask=mask, return_weights=True).weights.dense()
    exact = torch.linalg.svdvals(dense)[..., :4]
    slack = 1e-11 if dtype == torch.float64 else 1e-5
    previous = None
    for iterations in (0, 2, 6):
        spectrum = weights.singular_values(4, iterations=iterations)
        within(spectrum, exact, slack)
        missed = (exact - spectrum.values).max()
        assert previous is None or missed <= previous + slack
        previous = missed
    assert previous < 0.02


def test_more_iterations_than_there_are_queries() -> None:
    q = torch.randn(1, 1, 6, 3, dtype=torch.float64)
    weights = regard.attention(q, q, q, return_weights=True).weights
    spectrum = weights.singular_values(3, iterations=50)
    torch.testing.assert_close(spectrum.values, torch.linalg.svdvals(weights.dense())[..., :3])
    assert spectrum.error.max() < 1e-12


def test_averages_and_stacks_have_spectra_too() -> None:
    q = torch.randn(2, 3, 6, 3, dtype=torch.float64)
    weights = regard.attention(q, q, q, return_weights=True).weights
    for one in (weights.average(), regard.maps.stack([weights, weights]), weights.only(columns=slice(1, 4))):
        within(one.singular_values(2), torch.linalg.svdvals(one.dense())[..., :2], 1e-12)


def test_the_same_seed_gives_the_same_values() -> None:
    q = torch.randn(1, 2, 30, 3)
    weights = regard.attention(q, q, q, return_weights=True).weights
    state = torch.get_rng_state()
    one, other = weights.singular_values(3, seed=5), weights.singular_values(3, seed=5)
    assert torch.equal(one.values, other.values)
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(one.error, weights.singular_values(3, seed=6).error)


@pytest.mark.parametrize(("queries", "keys"), [(40, 50), (64, 33), (7, 1000)])
def test_the_bound_of_a_map_of_low_rank_holds_beyond_rounding(queries: int, keys: int) -> None:
    """Equal rows: what is left beside the largest value is rounding, and so is the error of that value.

    How a product is rounded depends on the processor, so that no one size shows it on all of them.
    """
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        k = torch.randn(1, 1, keys, 4, generator=generator)
        weights = regard.attention(torch.ones(1, 1, queries, 4), k, k, return_weights=True).weights
        found = weights.singular_values(1)
        assert (torch.linalg.svdvals(weights.dense().double())[..., :1] <= found.values.double() + found.error).all()
        assert found.error.max() < 1e-5


def test_the_norm_of_the_rest_is_bounded_for_every_seed() -> None:
    """Of a map with one value far above the others; without its constant, one bound of twenty would be too low."""
    q = 0.01 * torch.randn(1, 1, 12, 3, dtype=torch.float64)
    weights = regard.attention(q, q, q, return_weights=True).weights
    largest = torch.linalg.svdvals(weights.dense())[..., 0]
    for seed in range(200):
        probes = torch.randn(1, 1, 12, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert (
            _norm_of_residual(weights.source, torch.zeros(1, 1, 12, 1, dtype=torch.float64), probes) >= largest
        ).all()


@pytest.mark.parametrize("far", [30.0, 60.0, 80.0])
def test_the_bound_holds_where_squares_of_weights_vanish(far: float) -> None:
    """exp(-60) is a number of float32, and its square is not."""
    q, k = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 12, 4)
    bias, kernel = torch.full((1, 1, 9, 12), -far), regard.Unnormalized()
    weights = regard.attention(q, k, k, bias=bias, normalization=kernel, return_weights=True).weights
    exact = torch.linalg.svdvals(weights.dense().double())
    spectrum = weights.singular_values(3)
    within(regard.maps.Spectrum(spectrum.values.double(), spectrum.error.double()), exact[..., :3], 1e-5 * exact.max())
