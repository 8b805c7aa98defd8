"""Linear layers. On a CPU float32 goes to oneDNN where MKL is slow, and products of bf16 autocast have few sizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from regard.mechanisms.guards import has_values, may_have_own_gradient
from regard.nn.half_linear import half_linear
from regard.torch_private import has_amx, has_avx512_bf16, has_hooks_of_all, is_bare, parameter

WORTH_IT = 1 << 23
"""The number of multiplications below which a product is left to torch."""


class Linear(nn.Linear):
    r"""$x W^\top + b$: a `torch.nn.Linear` that calls `linear`.

    >>> Linear(4, 2)(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch E"]:
        """Apply the layer; x may have any batch dimensions."""
        return linear(x, self.weight, self.bias)


_OURS, _TORCHS = Linear.forward, NonDynamicallyQuantizableLinear.forward


def short_product(layer: nn.Module, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch E"]:
    """`layer(x)` where neither gradients are recorded nor autocast is on: the product alone, if nothing else runs."""
    is_plain = is_bare(layer, Linear, _OURS) or is_bare(layer, NonDynamicallyQuantizableLinear, _TORCHS)
    if is_plain and not has_hooks_of_all():
        return nn.functional.linear(x, parameter(layer, "weight"), parameter(layer, "bias"))
    return cast(Tensor, layer(x))


def linear(
    x: Float[Tensor, "*batch D"], weight: Float[Tensor, "E D"], bias: Float[Tensor, " E"] | None = None
) -> Float[Tensor, "*batch E"]:
    r"""$x W^\top + b$, as `torch.nn.functional.linear`, in the same precision.

    torch multiplies float32 by MKL, which has AVX-512 code for Intel's processors only. On an AMD Zen 5, oneDNN (also
    part of torch) computes the same products in half the time. On such a processor oneDNN computes those products that
    need a gradient, and the products of that gradient. It sums in another order, so the last bits differ.

    Under bfloat16 autocast on a CPU rows of zeros bring products to few different sizes (`regard.nn.half_linear`).

    >>> x, weight = torch.randn(5, 4), torch.randn(2, 4)
    >>> torch.allclose(linear(x, weight), x @ weight.T)
    True
    """
    if _has_few_sizes(x, weight):
        return half_linear(x, weight, bias)
    if _goes_to_onednn(x, weight):
        return _Linear.apply(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def _goes_to_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and onednn_is_faster()
        and _is_large_and_plain(x, weight)
        and x.dtype == weight.dtype == torch.float32
        and (x.requires_grad or weight.requires_grad)
        and not torch.is_autocast_enabled("cpu")
    )


def _has_few_sizes(x: Tensor, weight: Tensor) -> bool:
    return (
        torch.is_autocast_enabled("cpu")
        and _is_large_and_plain(x, weight)
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and {x.dtype, weight.dtype} <= {torch.float32, torch.bfloat16}
        and weight.ndim == 2
        # Weights of another type may have a product of their own, and a recorded graph would keep the number of rows.
        and {type(x), type(weight)} <= {Tensor, nn.Parameter}
        and has_values(x)
    )


def _is_large_and_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is worth a choice, and no graph or transform of torch would lose its gradient by one."""
    return may_have_own_gradient(x) and is_large(x, weight)


def is_large(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is worth a choice."""
    return bool(x.numel() * weight.shape[0] >= WORTH_IT)


class _Linear(torch.autograd.Function):
    """The product, with its gradients written out: autograd would compute them by MKL."""

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
    """In this context oneDNN computes torch's float32 matrix products if `onednn_is_faster`.

    torch has this switch to let oneDNN round to bfloat16 when it multiplies. If the processor gains nothing from that,
    oneDNN multiplies in float32. The switch is not for attention kernels: it slows down their many small products.
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
    """Whether oneDNN multiplies float32 faster than MKL here, in full precision. The processor's name decides.

    Nothing is timed, because a resumed run has to choose the same again. Processors with AMX would round to bfloat16,
    so the answer for them is no.
    """
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and has_switch()):
        return False
    wide = has_avx512_bf16() and not has_amx()
    return wide and _is_amd() and _stays_float32()


def has_switch() -> bool:
    """Whether this torch (2.9 or newer) lets oneDNN's precision be chosen."""
    return hasattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision")


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return False


def _stays_float32() -> bool:
    """Whether a product with the switch has the error of float32; in bfloat16 it would err by a thousandth."""
    x = torch.linspace(1.0, 2.0, 256 * 256).view(256, 256)
    with _switched():
        product = x @ x
    exact = x.double() @ x.double()
    return bool((product - exact).abs().max() < 1e-5 * exact.abs().max())
