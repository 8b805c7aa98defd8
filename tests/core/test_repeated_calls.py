"""Calls of one kind after one another: decisions that were cached for one call never answer for another."""

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import regard
from regard.call import shapes
from regard.errors import NonFiniteError, OverwrittenError, ShapeError
from regard.functional import Attended
from regard.kernels import fused_plan
from regard.maps.sources.call import source_of_call
from tests.core.random_calls import DTYPES, Case, cases
from tests.fuzz.core.masks import random_mask
from tests.fuzz.core.parts import Sides
from tests.fuzz.drawing import Covering


@pytest.fixture
def nothing_cached() -> None:
    _forget()


def _forget() -> None:
    fused_plan._cached_layout.cache_clear()
    shapes._cached_sizes.cache_clear()


def first_and_third(*tensors: Tensor, **options: Any) -> tuple[Attended, Attended]:
    _forget()
    with torch.no_grad():
        first = regard.attention(*tensors, return_weights=True, **options)
        regard.attention(*tensors, **options)
        return first, regard.attention(*tensors, return_weights=True, **options)


def _state(attended: Attended) -> Tensor:
    return source_of_call(attended.weights.source, "a test").state


def assert_same(one: Attended, other: Attended) -> None:
    assert torch.equal(one.output, other.output)
    assert one.output.stride() == other.output.stride()
    assert torch.equal(one.weights.dense(), other.weights.dense())
    assert torch.equal(one.weights.received(), other.weights.received())
    assert torch.equal(_state(one), _state(other))
    assert str(one.weights) == str(other.weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(case=cases())
def test_a_cache_changes_no_bit(dtype: torch.dtype, case: Case) -> None:
    case = case.to(dtype)
    assert_same(*first_and_third(*case.tensors(), **case.options()))


@pytest.mark.parametrize("keys", [9, 11])
def test_masks_of_every_kind_after_one_another(keys: int) -> None:
    """Each in the wake of all others, so that a decision of one of them could be taken for another."""
    sides, counts = Sides((2,), 4, 2, 9, keys, 8, 8, True), dict[Any, list[int]]()
    drawn = [random_mask(Covering(counts, seed), sides).mask for seed in range(40)]
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)
    for mask in [*drawn, *reversed(drawn)]:
        output, weights = regard.attention(q, k, v, mask=mask, return_weights=True)
        expected = regard.attention(q, k, v, mask=mask, return_weights=True, backend="reference")
        torch.testing.assert_close(output, expected.output, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(weights.dense(), expected.weights.dense(), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("nothing_cached")
def test_layouts_of_masks_without_tensors_alone_are_cached() -> None:
    q = torch.randn(1, 1, 300, 8)
    for mask in (regard.causal(), regard.lengths(torch.tensor([3])), regard.causal(torch.tensor([2]))):
        regard.attention(q, q, q, mask=mask)
    regard.attention(q, q, q, mask=regard.predicate(lambda batch, head, query, key: key <= query))
    assert not fused_plan._cached_layout.cache_info().currsize
    for _ in range(3):
        regard.attention(q, q, q, mask=regard.window(5))
    info = fused_plan._cached_layout.cache_info()
    assert (info.currsize, info.hits) == (1, 2)


def test_what_calls_of_one_shape_differ_in() -> None:
    """One call after another, each of which must not be taken for the one before it."""
    q = torch.randn(1, 2, 6, 8)
    expected = [regard.attention(q, q, q, score=regard.ScaledDot(s), backend="reference") for s in (0.3, -0.3)]
    for _ in range(2):
        for scale, right in zip((0.3, -0.3), expected, strict=True):
            torch.testing.assert_close(regard.attention(q, q, q, score=regard.ScaledDot(scale)), right)
        with torch.autocast("cpu", torch.bfloat16):
            assert regard.attention(q, q, q).dtype == torch.bfloat16
        with regard.call.checks.checking(), pytest.raises(NonFiniteError):
            regard.attention(q * torch.nan, q, q)
        assert regard.attention(q.double(), q.double(), q.double()).dtype == torch.float64


def output_and_gradients(*tensors: Tensor, **options: Any) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    output = regard.attention(*leaves, **options)
    # Weights of no regular pattern, so that no gradient is that of a sum, which is 0.
    grad = torch.arange(output.numel(), dtype=torch.float64).sin().view_as(output).to(output.dtype)
    return [output, *torch.autograd.grad(output, leaves, grad)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(case=cases())
def test_a_cache_changes_no_bit_of_a_gradient(dtype: torch.dtype, case: Case) -> None:
    case = case.to(dtype)
    _forget()
    first, _, third = (output_and_gradients(*case.tensors(), **case.options()) for _ in range(3))
    for one, other in zip(first, third, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("nothing_cached")
def test_a_checkpoint_computes_the_same_again() -> None:
    """The first call fills the caches, and the same call in the backward pass reads them."""
    q = torch.randn(1, 2, 7, 8, dtype=torch.float64, requires_grad=True)
    output = checkpoint(lambda x: regard.attention(x, x, x, mask=regard.window(2)), q, use_reentrant=False)
    (grad,) = torch.autograd.grad(output.square().sum(), q)
    expected = regard.attention(q, q, q, mask=regard.window(2), backend="tiled").square().sum()
    torch.testing.assert_close(grad, torch.autograd.grad(expected, q)[0])


def test_nothing_holds_queries_and_keys_but_what_is_saved() -> None:
    """Hooks that move saved tensors, to another memory or to a file, move all of them."""
    q = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    regard.attention(q, q, q)
    leaf = q.clone().requires_grad_()
    doubled = leaf * 2
    gone = weakref.ref(doubled)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.detach().clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        output = regard.attention(doubled, doubled, doubled)
    del doubled
    assert gone() is None
    (grad,) = torch.autograd.grad(output.square().sum(), leaf)
    expected = q.clone().requires_grad_()
    by_tiles = regard.attention(2 * expected, 2 * expected, 2 * expected, backend="tiled").square().sum()
    torch.testing.assert_close(grad, torch.autograd.grad(by_tiles, expected)[0])


def test_errors_are_those_of_a_first_call() -> None:
    q = torch.randn(2, 2, 6, 8)
    for _ in range(2):
        regard.attention(q, q, q, mask=regard.lengths(torch.tensor([1, 2])))
    for _ in range(2):
        with pytest.raises(ShapeError, match="lengths must have shape"):
            regard.attention(q, q, q, mask=regard.lengths(torch.tensor([1, 2, 3])))
        with pytest.raises(ShapeError, match="same length"):
            regard.attention(q, q, q[:, :, :3])


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("mask", [None, regard.causal(0)], ids=str)
def test_a_copy_of_a_map_that_nobody_has_read_is_nobody_elses(mask: Any, copied: Callable[[Any], Any]) -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    q.mul_(2.0)  # A copy begins to count anew.
    for _ in range(2):
        weights = regard.attention(q, k, k, mask=mask, return_weights=True).weights
    expected = regard.attention(q.clone(), k, k, mask=mask, return_weights=True).weights.dense()
    kept = copied(weights)
    q.zero_()
    with pytest.raises(OverwrittenError, match="the queries"):
        weights.dense()
    assert torch.equal(kept.dense(), expected)
    assert torch.equal(kept[..., 1:, :].dense(), expected[..., 1:, :])
