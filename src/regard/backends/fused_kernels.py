"""torch's fused kernels, each with a forward that returns the log-sum-exp and a backward that takes its gradient.

torch's public function hides the log-sum-exp (lse) that its kernels compute, and accepts no gradient for it. Here
each kernel is called through the operator that returns the lse. The gradient of the lse goes through the kernel's
own backward as one more column: with q and k extended by 0, v by 1, out by 0 and grad_out by dlse, the operator
computes dS = P * (dO v^T - delta) + P * dlse.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.mechanisms.shapes import Sizes

aten = torch.ops.aten
Extras = tuple[Any, ...]
"""What a kernel's forward returns for its own backward, besides output and lse."""
Residuals = tuple[Tensor, ...]
"""The saved tensors: query, key, value, output and lse."""

SHORT = 256
"""The most queries for which the backward of the CPU kernel is faster in float32 than in half precision."""


class Kernel(ABC):
    """A fused kernel: `forward` returns the output, the lse, and what else `backward` needs."""

    name: ClassVar[str]

    @abstractmethod
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, additive: Tensor | None, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Extras]:
        """The output (B, H, t, E), the lse (B, H, t), and the kernel's own extras."""

    @abstractmethod
    def backward(
        self,
        grad: Tensor,
        saved: Residuals,
        extras: Extras,
        *,
        additive: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value, from saved = (query, key, value, output, lse)."""


class CpuFlash(Kernel):
    """`_scaled_dot_product_flash_attention_for_cpu`: the kernel of F.scaled_dot_product_attention on CPU."""

    name = "flash, CPU"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        additive: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Extras]:
        """Grouped heads are passed as they are."""
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=additive, scale=scale
        )
        return output, lse, ()

    def backward(
        self,
        grad: Tensor,
        saved: Residuals,
        extras: Extras,
        *,
        additive: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call the operator's own backward, in float32 for short half-precision blocks."""
        dtype = saved[0].dtype
        if dtype in (torch.float16, torch.bfloat16) and saved[0].shape[-2] <= SHORT:
            # On 110 sentences of 17 tokens the operator takes 15 ms in bf16, and 1.7 ms in float32 including the casts.
            grad, *saved_ = (t.float() for t in (grad, *saved))
            additive = None if additive is None else additive.float()
            grads = self._backward(grad, tuple(saved_), additive, is_causal, scale)
            return grads[0].to(dtype), grads[1].to(dtype), grads[2].to(dtype)
        return self._backward(grad, saved, additive, is_causal, scale)

    @staticmethod
    def _backward(
        grad: Tensor, saved: Residuals, additive: Tensor | None, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *saved, 0.0, is_causal, attn_mask=additive, scale=scale
        )


class CudaEfficient(Kernel):
    """`_scaled_dot_product_efficient_attention`: the memory-efficient CUDA kernel, for any additive mask.

    It needs repeated key heads, widths that are multiples of 8, and a mask whose rows are padded to a multiple of 16.
    """

    name = "memory-efficient, CUDA"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        additive: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Extras]:
        """The operator pads the lse to a multiple of 32 rows; the extras keep the padded lse for the backward."""
        key, value = _repeat_heads(query, key), _repeat_heads(query, value)
        additive = _align(additive, query, key)
        output, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
            query, key, value, additive, True, 0.0, is_causal, scale=scale
        )
        return output, lse[..., : query.shape[-2]], (lse, seed, offset)

    def backward(
        self,
        grad: Tensor,
        saved: Residuals,
        extras: Extras,
        *,
        additive: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The operator's own backward; gradients of repeated heads are summed."""
        query, key, value, output, lse = saved
        padded, seed, offset = extras
        padded = torch.nn.functional.pad(lse, (0, padded.shape[-1] - lse.shape[-1]))
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, query, _repeat_heads(query, key), _repeat_heads(query, value), _align(additive, query, key),
            output, padded, seed, offset, 0.0, [True, True, True, False], is_causal, scale=scale,
        )  # fmt: skip
        return dq, _sum_heads(dk, key), _sum_heads(dv, value)


class CudaFlash(Kernel):
    """`_scaled_dot_product_flash_attention`: for half precision; its only mask is the causal flag."""

    name = "flash, CUDA"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        additive: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Extras]:
        """Grouped heads are repeated, as in F.scaled_dot_product_attention."""
        key, value = _repeat_heads(query, key), _repeat_heads(query, value)
        output, lse, *rest = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
        cum_q, cum_k, max_q, max_k, rng_state, unused, _ = rest
        return output, lse, (cum_q, cum_k, max_q, max_k, rng_state, unused)

    def backward(
        self,
        grad: Tensor,
        saved: Residuals,
        extras: Extras,
        *,
        additive: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The operator's own backward; gradients of repeated heads are summed."""
        query, key, value, output, lse = saved
        cum_q, cum_k, max_q, max_k, rng_state, unused = extras
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, query, _repeat_heads(query, key), _repeat_heads(query, value), output, lse,
            cum_q, cum_k, max_q, max_k, 0.0, is_causal, rng_state, unused, scale=scale,
        )  # fmt: skip
        return dq, _sum_heads(dk, key), _sum_heads(dv, value)


def kernel_for(query: Tensor, sizes: Sizes, *, has_additive: bool) -> Kernel | None:
    """The kernel for a device and dtype, or None if torch has none that returns its lse."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.device.type == "cpu" and (half or query.dtype in (torch.float32, torch.float64)):
        return CpuFlash()
    if query.device.type != "cuda" or not (half or query.dtype == torch.float32):
        return None
    if half and not has_additive and query.shape[-1] <= 256 and torch.backends.cuda.is_flash_attention_available():
        return CudaFlash()
    return CudaEfficient()


def _repeat_heads(query: Tensor, tensor: Tensor) -> Tensor:
    group = query.shape[1] // tensor.shape[1]
    return tensor.repeat_interleave(group, dim=1) if group > 1 else tensor


def _sum_heads(grad: Tensor, tensor: Tensor) -> Tensor:
    return grad if grad.shape[1] == tensor.shape[1] else grad.unflatten(1, (tensor.shape[1], -1)).sum(2)


def _align(additive: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Expand a mask to (B, H, T, S), in a storage whose rows are padded to a multiple of 16 numbers."""
    if additive is None:
        return None
    length = key.shape[-2]
    padded = torch.nn.functional.pad(additive.to(query.dtype), (0, -length % 16))
    return padded[..., :length].expand(query.shape[0], query.shape[1], query.shape[2], length)
