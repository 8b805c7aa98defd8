"""Linear layers: the same numbers and gradients wherever they are multiplied."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.nn import Linear
from regard.nn import linear as module
from regard.nn.linear import by_onednn, linear, onednn_is_faster

pytestmark = pytest.mark.skipif(not module.has_switch(), reason="torch 2.8 does not let oneDNN's precision be chosen")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every processor counts as one where oneDNN is faster, and every product as large enough."""
    monkeypatch.setattr(module, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(module, "WORTH_IT", 0)


def written_out(output: Tensor) -> bool:
    return "_Linear" in type(output.grad_fn).__name__


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_float32s(bias: bool) -> None:
    x, weight = torch.randn(3, 50, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    tensors = (x, weight, torch.randn(32, requires_grad=True)) if bias else (x, weight)
    output = linear(*tensors)
    assert written_out(output)
    up = torch.randn_like(output)
    exact = F.linear(*(t.double() for t in tensors))
    found = (output, *torch.autograd.grad(output, tensors, up))
    for ours, theirs in zip(found, (exact, *torch.autograd.grad(exact, tensors, up.double())), strict=True):
        # On a processor with AMX the switch would round to bfloat16, which is why it is never used there.
        tolerance = 2e-2 if torch.cpu._is_amx_tile_supported() else 2e-6
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_gradients_by_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_goes_to_onednn", lambda x, weight: True)
    tensors = [torch.randn(n, dtype=torch.float64, requires_grad=True) for n in ((2, 3, 4), (5, 4), (5,))]
    assert written_out(linear(*tensors))
    assert torch.autograd.gradcheck(linear, tensors)
    assert torch.autograd.gradgradcheck(linear, tensors)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("always")
def test_what_needs_no_gradient_and_what_torch_transforms_stay_with_torch() -> None:
    layer, x = Linear(4, 3), torch.randn(5, 4)
    assert written_out(layer(x))
    with torch.no_grad():
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert not written_out(layer.double()(x.double()))
    weight = layer.float().weight.detach()
    assert torch.func.vmap(linear, (0, None))(x, weight).shape == (5, 3)
    assert torch.func.grad(lambda w: linear(x, w).sum())(weight).shape == (3, 4)
    assert torch.func.jvp(lambda w: linear(x, w), (weight,), (weight,))[1].shape == (5, 3)


def test_the_switch_is_put_back() -> None:
    mkldnn: Any = torch.backends.mkldnn
    matmul = mkldnn.matmul
    before = matmul.fp32_precision
    with by_onednn():
        assert matmul.fp32_precision == ("bf16" if onednn_is_faster() else before)
    assert matmul.fp32_precision == before
    with pytest.raises(RuntimeError), by_onednn():
        torch.ones(2) @ torch.ones(3)
    assert matmul.fp32_precision == before
