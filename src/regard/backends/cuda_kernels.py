"""torch's fused kernels for CUDA, each called within the contract of its operator, which torch does not check itself.

What the sources of torch 2.11 to 2.15 say of the operators:

- The flash kernel has no additive mask. Its causal flag is aligned with the last key: row i sees the keys up to
  i + S - T. The memory-efficient kernel and the kernel of the CPU align theirs with the first key.
- The flash kernel reads the log-sum-exp in its backward from a pointer, as if it were contiguous.
- The memory-efficient kernel pads the log-sum-exp to a multiple of 32 rows with +inf, and its backward relies on that.
- It takes an additive mask only in the dtype of the query, with strides that are multiples of 8.
- Both need widths that are multiples of 8; flash takes at most 256, and goes back through widths of 193 to 224 on
  data-centre GPUs alone. Flash takes grouped heads as they are, the other one takes them repeated.
- A grid of blocks has at most 65,535 sequences and heads, and neither kernel takes an empty batch.
"""

import torch
from torch import Tensor

from regard.backends.fused_kernels import Extras, Kernel, Residuals, repeated, summed
from regard.backends.fused_plan import Plan
from regard.mechanisms.devices import capability_of
from regard.mechanisms.shapes import Sizes
from regard.torch_private import efficient_cuda, efficient_cuda_backward, flash_cuda, flash_cuda_backward, missing

NEWEST = (9, 0)
"""The compute capability that is taken for granted where there is no GPU to ask."""
MOST_IN_GRID = 65_535
"""The most sequences, and the most heads, that one call of a kernel takes."""
WIDEST_FLASH = 256
BACKWARD_OF_DATA_CENTRES = range(193, 225)
"""Widths through which flash goes back on GPUs of capability 8.0, 9.0 and 10.x, but not on those of desktops."""
LSE_ROWS = 32
"""The memory-efficient kernel pads the log-sum-exp to a multiple of so many rows."""


def cuda_kernel(query: Tensor, *, width: int, covering: Plan | None) -> Kernel | None:
    """The kernel for a query on CUDA; None if torch has none that returns its log-sum-exp.

    Args:
        query: the query.
        width: the width of the vectors.
        covering: how the mask is covered; None takes the kernel that runs any plan.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    capability = capability_of(query.device) or NEWEST
    if not (half or query.dtype == torch.float32) or (query.dtype == torch.bfloat16 and capability < (8, 0)):
        return None
    has_flash = capability >= (8, 0) and torch.backends.cuda.is_flash_attention_available()
    width += -width % CudaKernel.multiple
    has_flash = has_flash and missing(*CudaFlash.operators) is None
    if half and has_flash and width <= WIDEST_FLASH and covering is not None and covering.is_square:
        return CudaFlash()
    return CudaEfficient()


class CudaKernel(Kernel):
    """What the kernels of CUDA have in common."""

    multiple = 8

    def refuses(self, sizes: Sizes) -> str | None:
        """An empty batch, and more sequences or heads than a grid has blocks."""
        if sizes.flat_batch == 0:
            return "the kernels of CUDA take no empty batch"
        if max(sizes.flat_batch, sizes.heads) > MOST_IN_GRID:
            return f"the kernels of CUDA take at most {MOST_IN_GRID:,} sequences and as many heads"
        return None


class CudaEfficient(CudaKernel):
    """`_scaled_dot_product_efficient_attention`: the memory-efficient kernel, for any additive mask."""

    name = "memory-efficient, CUDA"
    operators = (efficient_cuda, efficient_cuda_backward)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, additive: Tensor | None, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Extras]:
        """The extras keep the length of the padded log-sum-exp for the backward."""
        dtype, queries = query.dtype, query.shape[-2]
        query, key, value = _as_precise_as(additive, query, repeated(query, key), repeated(query, value))
        output, lse, seed, offset = efficient_cuda(
            query, key, value, _aligned(additive, query, key), True, 0.0, is_causal, scale=scale
        )
        return output.to(dtype), lse[..., :queries], (lse.shape[-1], seed, offset)

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
        dtype, (length, seed, offset) = query.dtype, extras
        padded = torch.nn.functional.pad(lse, (0, length - lse.shape[-1]), value=torch.inf).contiguous()
        grad, q, k, v, output = _as_precise_as(
            additive, grad, query, repeated(query, key), repeated(query, value), output
        )
        dq, dk, dv, _ = efficient_cuda_backward(
            grad, q, k, v, _aligned(additive, q, k), output, padded, seed, offset, 0.0,
            [True, True, True, False], is_causal, scale=scale,
        )  # fmt: skip
        return dq.to(dtype), summed(dk, key).to(dtype), summed(dv, value).to(dtype)


class CudaFlash(CudaKernel):
    """`_scaled_dot_product_flash_attention`: for half precision. Its one mask is the flag, for as many keys as rows."""

    name = "flash, CUDA"
    operators = (flash_cuda, flash_cuda_backward)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, additive: Tensor | None, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Extras]:
        """Grouped heads are passed as they are."""
        assert additive is None, "the plan has said so"
        assert not is_causal or query.shape[-2] == key.shape[-2], "the plan has said so"
        output, lse, *rest = flash_cuda(query, key, value, 0.0, is_causal, False, scale=scale)
        cum_q, cum_k, max_q, max_k, seed, offset, _ = rest
        return output, lse, (cum_q, cum_k, max_q, max_k, seed, offset)

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
        """The operator's own backward; for widths that it does not take, that of the memory-efficient kernel."""
        query, key, value, output, lse = saved
        if not _goes_back(query):
            rows = query.shape[-2]
            length = rows if torch.version.hip else rows + -rows % LSE_ROWS
            unused = torch.zeros((), dtype=torch.int64)  # of dropout, which is 0
            return CudaEfficient().backward(
                grad, saved, (length, unused, unused), additive=None, is_causal=is_causal, scale=scale
            )
        cum_q, cum_k, max_q, max_k, seed, offset = extras
        dq, dk, dv = flash_cuda_backward(
            grad, query, key, value, output, lse.contiguous(), cum_q, cum_k, max_q, max_k, 0.0, is_causal,
            seed, offset, scale=scale,
        )  # fmt: skip
        return dq, dk, dv


def _goes_back(query: Tensor) -> bool:
    """Whether flash has a backward for this width, to which the gradient of the log-sum-exp may have added columns."""
    width = query.shape[-1]
    if width not in BACKWARD_OF_DATA_CENTRES:
        return width <= WIDEST_FLASH
    major, minor = capability_of(query.device) or NEWEST
    return (major, minor) == (8, 0) or major in (9, 10)


def _as_precise_as(additive: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of a bias that is more precise than they are.

    The kernel takes both in one dtype. A bias in half precision would err by several nats: that of ALiBi counts to
    thousands, and bf16 has eight bits.
    """
    if additive is None:
        return tensors
    dtype = torch.promote_types(tensors[0].dtype, additive.dtype)
    return tuple(t.to(dtype) for t in tensors)


def _aligned(additive: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Expand a mask to (B, H, T, S), in a storage whose rows are padded to a multiple of 16 numbers."""
    if additive is None:
        return None
    length = key.shape[-2]
    padded = torch.nn.functional.pad(additive.to(query.dtype), (0, -length % 16)).contiguous()
    return padded[..., :length].expand(query.shape[0], query.shape[1], query.shape[2], length)
