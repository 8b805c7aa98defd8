"""Linear layers; on processors for which MKL has no fast code, training takes their float32 products to oneDNN."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.mechanisms.transforms import in_forward_mode, in_transform

WORTH_IT = 1 << 23
"""Multiplications below which a product is left where it is."""


class Linear(nn.Linear):
    r"""$x W^\top + b$: a `torch.nn.Linear` by `linear`.

    >>> Linear(4, 2)(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch E"]:
        """Any batch dimensions."""
        return linear(x, self.weight, self.bias)


def linear(
    x: Float[Tensor, "*batch D"], weight: Float[Tensor, "E D"], bias: Float[Tensor, " E"] | None = None
) -> Float[Tensor, "*batch E"]:
    r"""$x W^\top + b$, as `torch.nn.functional.linear`, in the same precision.

    torch multiplies float32 by MKL, which gives processors of other makers than Intel no AVX-512 code: on an AMD
    Zen 5, oneDNN (also part of torch) makes the same products in half the time. Where that is so, a product
    whose gradient will be asked for, and the products of that gradient, go there. The order of summation differs, so
    the last bits do.

    >>> x, weight = torch.randn(5, 4), torch.randn(2, 4)
    >>> torch.allclose(linear(x, weight), x @ weight.T)
    True
    """
    if _goes_to_onednn(x, weight):
        return _Linear.apply(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def _goes_to_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and x.numel() * weight.shape[0] >= WORTH_IT
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and (x.requires_grad or weight.requires_grad)
        and not torch.is_autocast_enabled("cpu")
        and not in_forward_mode()
        and not in_transform("Vmap", "Grad", "Jvp")
        and onednn_is_faster()
    )


class _Linear(torch.autograd.Function):
    """The product and, written out, its gradients: autograd would take these to MKL."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        with by_onednn():
            return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        with by_onednn():
            return (
                (rows @ weight).view_as(x) if of_x else None,
                rows.mT @ x.reshape(-1, x.shape[-1]) if of_weight else None,
                rows.sum(0) if of_bias else None,
            )


@contextmanager
def by_onednn() -> Iterator[None]:
    """Inside, torch's float32 matrix products go to oneDNN where `onednn_is_faster`.

    torch has this switch for letting oneDNN round to bfloat16 as it multiplies; where the processor gains nothing by
    that, oneDNN multiplies in float32. It is not for attention kernels, whose many small products it slows down.
    """
    if not onednn_is_faster():
        yield
        return
    with _switched():
        yield


@contextmanager
def _switched() -> Iterator[None]:
    matmul = cast(Any, torch.backends.mkldnn).matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 faster than MKL here, in full precision: by the processor's name, no timing.

    A resumed run has to choose the same again. Processors with AMX would round to bfloat16, and are left out.
    """
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    wide = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    return wide and _is_amd() and _stays_float32()


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return False


def _stays_float32() -> bool:
    """Whether a product under the switch has float32's error: bfloat16 would be off by a thousandth."""
    x = torch.linspace(1.0, 2.0, 256 * 256).view(256, 256)
    with _switched():
        product = x @ x
    exact = x.double() @ x.double()
    return bool((product - exact).abs().max() < 1e-5 * exact.abs().max())
