"""A linear layer that no longer learns, against F.linear."""

from typing import Any

import pytest
import torch
from torch import nn

from regard.nn import fixed_linear
from regard.nn.fixed_linear import FixedLinear

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 37])
@pytest.mark.parametrize(("has_bias", "activation"), [(True, "none"), (False, "none"), (True, "relu")])
def test_it_is_a_linear_layer(dtype: torch.dtype, rows: int, has_bias: bool, activation: Any) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(29, 13, dtype=torch.float64), torch.randn(rows, 13, dtype=torch.float64)
    bias = torch.randn(29, dtype=torch.float64) if has_bias else None
    expected = nn.functional.linear(x, weight, bias)
    expected = expected.relu() if activation == "relu" else expected
    layer = FixedLinear(weight, bias, dtype=dtype, activation=activation)
    found = layer(x)
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()
    assert torch.equal(layer(x, dtype=torch.float64), found.double())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("other", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_what_is_added_is_left_as_it_was(dtype: torch.dtype, other: torch.dtype, activation: Any) -> None:
    weight, x, plus = torch.randn(29, 13), torch.randn(5, 13), torch.randn(5, 29, dtype=other)
    layer, before = FixedLinear(weight, dtype=dtype, activation=activation), plus.clone()
    found = layer(x, plus=plus)
    assert torch.equal(plus, before)
    torch.testing.assert_close(found.double(), plus.double() + layer(x).double(), rtol=0, atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_onednn_it_is_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = torch.randn(29, 13), torch.randn(29), torch.randn(7, 13)
    with_it = FixedLinear(weight, bias, dtype=dtype, activation="relu")(x)
    monkeypatch.setattr(fixed_linear, "_laid_out", lambda *arguments: None)
    without = FixedLinear(weight, bias, dtype=dtype, activation="relu")(x)
    torch.testing.assert_close(with_it.float(), without.float(), rtol=2e-2, atol=2e-2)


def test_the_weights_are_those_of_its_making() -> None:
    layer, x = nn.Linear(13, 29), torch.randn(2, 13)
    fixed = FixedLinear(layer.weight, layer.bias)
    before = fixed(x).clone()
    nn.init.zeros_(layer.weight)
    assert torch.equal(fixed(x), before)
    assert not before.requires_grad


def test_one_row_has_weights_of_its_own_too() -> None:
    layer, x = nn.Linear(13, 29), torch.randn(1, 13)
    fixed = FixedLinear(layer.weight, layer.bias)
    before = fixed(x).clone()
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(fixed(x), before)
