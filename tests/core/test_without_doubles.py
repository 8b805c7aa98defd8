"""Where the device has no float64, as on Apple's GPUs, none is made there: its calls are refused here on the CPU."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import regard
from regard.nn import MultiHeadAttention
from regard.nn.embeddings import sinusoidal
from regard.tensors import memory
from tests.maps.test_map_indices import QUESTIONS as OF_A_MAP


class NoDoubles(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if any(isinstance(one, Tensor) and one.dtype == torch.float64 for one in tree_leaves(found)):
            raise TypeError(f"this device has no float64, and {function} makes it")
        return found


@pytest.fixture(autouse=True)
def _as_on_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    real = memory.widest_dtype
    for name, module in list(sys.modules.items()):
        if name.startswith("regard.") and vars(module).get("widest_dtype") is real:
            monkeypatch.setattr(module, "widest_dtype", lambda _device: torch.float32)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal and scaled": {"mask": regard.causal(), "score": regard.ScaledDot(0.3)},
    "cosine": {"score": regard.Cosine(7.0)},
    "capped": {"score": regard.SoftCapped(regard.ScaledDot(), 5.0), "mask": regard.window(3)},
    "ALiBi": {"bias": regard.ALiBi(2), "mask": regard.causal()},
    "sigmoid": {"normalization": regard.Sigmoid()},
    "entmax": {"normalization": regard.Entmax15()},
    "softpick": {"normalization": regard.call.normalizations.Softpick()},
}


@pytest.mark.parametrize("backend", [None, "tiled", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_and_its_gradients(name: str, backend: Any) -> None:
    q, k, v = (torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(3))
    with NoDoubles():
        regard.attention(q, k, v, backend=backend, **OPTIONS[name]).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize(("ask", "tail"), OF_A_MAP.values(), ids=OF_A_MAP)
def test_statistics(ask: Any, tail: tuple[int, ...]) -> None:
    q, k, x = torch.randn(1, 2, 40, 4), torch.randn(1, 2, 40, 4), torch.randn(40, 4)
    expected = ask(regard.attention(q, k, k, mask=regard.causal(), return_weights=True).weights, x)
    with NoDoubles():
        weights = regard.attention(q, k, k, mask=regard.causal(), return_weights=True).weights
        torch.testing.assert_close(ask(weights, x), expected)
        weights.spans(keys=[(0, 2), (1, 40)], queries=[(0, 5), (5, 40)])


def test_positions_and_the_largest_logit() -> None:
    layer, x = MultiHeadAttention(8, 2, rotary=regard.Rotary(4)), torch.randn(1, 6, 8)
    with NoDoubles():
        sinusoidal(torch.arange(6), 8)
        with regard.watch(layer) as seen:
            layer(x).sum().backward()
        assert seen.maps[0].max_logit().isfinite().all()
