"""The precision of the backward pass of half-precision tensors: its length decides, and it is right in either."""

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.kernels import fused_kernels
from regard.kernels.fused_kernels import HALF, SHORT
from regard.tensors.torch_private import flash_cpu_backward


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("length", [SHORT, SHORT + 1])
def test_short_blocks_go_back_in_float32(dtype: torch.dtype, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def watched(grad: Tensor, *given: Any, **named: Any) -> Any:
        seen.append(grad.dtype)
        return flash_cpu_backward(grad, *given, **named)

    monkeypatch.setattr(fused_kernels, "flash_cpu_backward", watched)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 16, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    output = regard.attention(q, k, v, mask=regard.causal(), backend="fused")
    output.backward(torch.ones_like(output))
    assert seen == [torch.float32 if length == SHORT else dtype]
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    right = regard.attention(*exact, mask=regard.causal(), backend="reference")
    right.backward(torch.ones_like(right))
    for given, double in zip((q, k, v), exact, strict=True):
        assert given.grad is not None
        assert double.grad is not None
        assert given.grad.dtype == dtype
        torch.testing.assert_close(given.grad.double(), double.grad, atol=3e-2, rtol=3e-2)
