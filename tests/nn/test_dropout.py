"""Dropout: what is dropped, how much, and the way back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.nn import Dropout

TOLERANCES: dict[Any, Any] = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_as_many_are_dropped_as_asked_in_every_lane_of_a_word(p: float, dtype: torch.dtype) -> None:
    x = torch.ones(40_000, dtype=dtype)
    dropped = Dropout(p)(x)
    share = (dropped == 0).double().view(-1, 4).mean(0)
    # Four standard deviations of a share of 10,000.
    assert ((share - p).abs() < 4 * (p * (1 - p) / 10_000) ** 0.5).all()
    torch.testing.assert_close(
        dropped[dropped != 0].double().unique(), torch.tensor([1 / (1 - p)]).double(), rtol=4e-3, atol=0
    )


def test_neighbours_are_dropped_independently() -> None:
    gone = (Dropout(0.5)(torch.ones(40_000)) == 0).double()
    for distance in range(1, 9):
        assert abs(float((gone[:-distance] * gone[distance:]).mean()) - 0.25) < 0.02


def test_the_gradient_goes_where_the_value_went() -> None:
    x = torch.randn(7, 5, 3, dtype=torch.float64, requires_grad=True)
    output = Dropout(0.3)(x)
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    torch.testing.assert_close(grad * x, output)

    def same_bits(x: Tensor) -> Any:
        torch.manual_seed(3)
        return Dropout(0.3)(x)

    assert torch.autograd.gradcheck(same_bits, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(same_bits, x, fast_mode=True)


def test_it_is_the_identity_in_evaluation_and_follows_the_generator() -> None:
    x, dropout = torch.randn(4, 9), Dropout(0.5)
    torch.manual_seed(1)
    first = dropout(x)
    second = dropout(x)
    torch.manual_seed(1)
    assert torch.equal(first, dropout(x))
    assert not torch.equal(first, second)
    assert dropout.eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert dropout.train()(torch.empty(0, 3)).shape == (0, 3)


def test_not_contiguous_and_grad_free() -> None:
    x = torch.ones(6, 8).T
    output = Dropout(0.5)(x)
    assert output.shape == x.shape
    assert set(output.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_a_probability_outside_its_range_is_refused(p: float) -> None:
    with pytest.raises(ArgumentError, match=r"in \[0, 1\)"):
        Dropout(p)


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float64), (torch.float32, torch.bfloat16)])
def test_the_joined_forms_are_the_plain_ones(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, y = (torch.randn(7, 5, 12).to(dtype).requires_grad_() for dtype in dtypes)
    dropout = Dropout(0.3)

    def run(function: Callable[..., Tensor], *inputs: Tensor) -> Any:
        torch.manual_seed(3)
        output = function(*inputs)
        return output, *torch.autograd.grad(output.double().pow(2).sum(), inputs)

    pairs = [
        (run(dropout.add, x, y), run(lambda x, y: x + dropout(y), x, y)),
        (run(dropout.relu, y), run(lambda y: dropout(y.relu()), y)),
    ]
    for joined, plain in pairs:
        for ours, theirs in zip(joined, plain, strict=True):
            assert ours.dtype == theirs.dtype
            # In bfloat16 the sum is rounded once instead of twice.
            torch.testing.assert_close(ours, theirs, **TOLERANCES[dtypes[1]])


def test_the_joined_forms_have_right_gradients() -> None:
    x, y = (torch.randn(4, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def same_bits(function: Callable[..., Any]) -> Any:
        def run(*inputs: Tensor) -> Any:
            torch.manual_seed(3)
            return function(*inputs)

        return run

    for function, inputs in ((Dropout(0.3).add, (x, y)), (Dropout(0.3).relu, (x,))):
        assert torch.autograd.gradcheck(same_bits(function), inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(same_bits(function), inputs, fast_mode=True)


def test_the_joined_forms_in_evaluation() -> None:
    x, y, dropout = torch.randn(3, 4), torch.randn(3, 4), Dropout(0.5).eval()
    assert torch.equal(dropout.add(x, y), x + y)
    assert torch.equal(dropout.relu(x), x.relu())
