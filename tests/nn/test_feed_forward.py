"""Feed-forward networks and residual blocks against their formulas."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.nn import FeedForward, GatedFeedForward, PostNorm, PreNorm

ACTIVATIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "relu": (nn.functional.relu, lambda z: z.clamp(min=0)),
    "gelu": (nn.functional.gelu, lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2),
    "silu": (nn.functional.silu, lambda z: z / (1 + torch.exp(-z))),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_feed_forward_networks_are_equations_2_and_6(name: str) -> None:
    activation, formula = ACTIVATIONS[name]
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    plain, gated = (kind(5, 11, activation=activation).double() for kind in (FeedForward, GatedFeedForward))
    hidden = formula(x @ plain.up.weight.T + plain.up.bias)
    torch.testing.assert_close(plain(x), hidden @ plain.down.weight.T + plain.down.bias, rtol=0, atol=1e-14)
    gate, up = gated.gate_and_up.weight[:11], gated.gate_and_up.weight[11:]
    torch.testing.assert_close(gated(x), (formula(x @ gate.T) * (x @ up.T)) @ gated.down.weight.T, rtol=0, atol=1e-14)
    assert [name for name, _ in gated.named_parameters()] == ["gate_and_up.weight", "down.weight"]


@pytest.mark.parametrize("make", [FeedForward, GatedFeedForward])
def test_dropout_is_on_the_hidden_units(make: Callable[..., nn.Module]) -> None:
    network = make(5, 11, dropout=0.5)
    hidden: list[Tensor] = []
    network.down.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    x = torch.randn(97, 5)
    assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))
    training, evaluating = hidden[0], hidden[-1]
    kept = training != 0
    torch.testing.assert_close(training[kept], 2 * evaluating[kept])


def norm(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()


def rms_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


@pytest.mark.parametrize(("kind", "formula"), [(nn.LayerNorm, norm), (nn.RMSNorm, rms_norm)])
def test_residual_blocks(kind: Callable[[int], nn.Module], formula: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    pre, post = PreNorm(5, norm=kind).double(), PostNorm(5, norm=kind).double()
    torch.testing.assert_close(pre(x, torch.sin), x + torch.sin(formula(x)), rtol=0, atol=1e-12)
    torch.testing.assert_close(post(x, torch.sin), formula(x + torch.sin(x)), rtol=0, atol=1e-12)
    assert (pre.needs_final_norm, post.needs_final_norm) == (True, False)


def test_dropout_is_on_the_sublayer_and_not_on_the_skip() -> None:
    x = torch.full((3, 101), 7.0)
    out = PreNorm(101, dropout=0.5)(x, torch.ones_like)
    assert set(out.flatten().tolist()) == {7.0, 9.0}


@pytest.mark.parametrize("make", [FeedForward, GatedFeedForward])
def test_widths_that_make_no_network(make: Callable[..., nn.Module]) -> None:
    with pytest.raises(ArgumentError, match="hidden_dim must be at least 1, got 0"):
        make(5, 0)


@pytest.mark.parametrize("kind", [FeedForward, GatedFeedForward])
def test_matrices_begin_by_glorot(kind: Any) -> None:
    """Of a gated network, gate and up are two matrices, although they are kept as one."""
    torch.manual_seed(0)
    network = kind(32, 128)
    matrices = [network.up.weight] if kind is FeedForward else network.gate_and_up.weight.chunk(2)
    for weight in (*matrices, network.down.weight):
        bound = (6 / (32 + 128)) ** 0.5
        assert 0.98 * bound < weight.abs().max() <= bound
