"""torch's fused CUDA kernels, within the contracts of their operators. torch itself does not check them.

From the sources of torch 2.11 to 2.15:

- The flash kernel has no additive mask. Its causal flag is aligned with the last key: row i sees the keys up to
  i + S - T. The memory-efficient kernel and the kernel of the CPU align theirs with the first key.
- The flash kernel reads the log-sum-exp in its backward from a pointer, as if it were contiguous.
- The memory-efficient kernel pads the log-sum-exp to a multiple of 32 rows with +inf for its backward.
- Its backward of half precision reads the output from a pointer, with rows heads times width apart, as in a contiguous
  (B, T, H, E). It takes the strides of sequences and heads from the tensor, and copies an output gradient of another
  layout.
- It takes an additive mask only in the dtype of the query, with strides in multiples of 8.
- cuDNN's kernel takes widths up to 128 and more than one key, aligns its flag with the first key, and gives the
  log-sum-exp with one more dimension. torch prefers it on Hopper and Blackwell, from cuDNN 9.15.1 on.
- All need widths in multiples of 8, and rows aligned to 16 bytes. Otherwise the memory-efficient kernel raises, flash
  ends the process, and cuDNN's returns wrong values (seen on an H200).
- Flash takes widths of at most 256, and its backward takes widths of 193 to 224 on data-centre GPUs only. Flash and
  cuDNN's take grouped heads as they are, the memory-efficient kernel takes them repeated.
- A grid of blocks has at most 65,535 sequences and heads, and no kernel takes an empty batch.
"""

import torch
from torch import Tensor

from regard.call.shapes import Sizes, repeated
from regard.kernels.fused_kernels import Extras, Gradients, Kernel, OneBlock, Residuals, summed
from regard.kernels.fused_plan import Plan
from regard.tensors.memory import row_contiguous
from regard.tensors.torch_private import (
    cudnn_cuda,
    cudnn_cuda_backward,
    efficient_cuda,
    efficient_cuda_backward,
    flash_cuda,
    flash_cuda_backward,
    missing,
)
from regard.tensors.triton_use import capability_of

NEWEST = (9, 0)
"""The assumed compute capability without a GPU."""
MOST_IN_GRID = 65_535
WIDEST_FLASH = 256
WIDEST_CUDNN = 128
CUDNN_AFTER = 91_500
"""torch prefers cuDNN's kernel from the version after this one, on the capabilities that follow."""
CUDNN_MAJOR = (9, 10)
BACKWARD_OF_DATA_CENTRES = range(193, 225)
"""Widths with a flash backward on GPUs of capability 8.0, 9.0 and 10.x, but not on desktop ones."""
FEWEST_OF_CUDNN = 1_024
"""cuDNN builds a plan for each new shape, in 40 ms, and in 46 ms for the backward: its gain over flash in hundreds of
calls of fewer queries (docs/design/gpu.md). Steps of a generation and batches of sentences all have new shapes.
"""
ALIGNED_BYTES = 16
LSE_ROWS = 32
"""The memory-efficient kernel pads the log-sum-exp to a multiple of so many rows."""


def cuda_kernel(query: Tensor, *, width: int, covering: Plan | None) -> Kernel | None:
    """The kernel for a query (B, H, T, D) of some width, under a plan or under any (None); None if there is none."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    capability = capability_of(query.device) or NEWEST
    if not (half or query.dtype == torch.float32) or (query.dtype == torch.bfloat16 and capability < (8, 0)):
        return None
    has_flash = capability >= (8, 0) and torch.backends.cuda.is_flash_attention_available()
    width += -width % CudaKernel.multiple
    has_flash = has_flash and missing(*CudaFlash.operators) is None
    if not half or covering is None or not covering.is_square:
        return CudaEfficient()
    if width <= WIDEST_CUDNN and capability[0] in CUDNN_MAJOR and _is_for_cudnn(covering):
        return CudaCudnn()
    return CudaFlash() if has_flash and width <= WIDEST_FLASH else CudaEfficient()


def _is_for_cudnn(covering: Plan) -> bool:
    block, *others = covering.every
    if others or len(block.rows) < FEWEST_OF_CUDNN or len(block.columns) < 2:
        return False
    # (ROCm's builds call MIOpen cuDNN, with versions of its own.)
    is_off = torch.version.hip is not None or not torch.backends.cuda.cudnn_sdp_enabled()
    if is_off or torch.are_deterministic_algorithms_enabled():
        return False
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return version is not None and version > CUDNN_AFTER and missing(*CudaCudnn.operators) is None


class CudaKernel(Kernel):
    multiple = 8

    def laid_out(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(_laid_out, tensors))

    def refuses(self, sizes: Sizes) -> str | None:
        if sizes.flat_batch == 0:
            return "the kernels of CUDA take no empty batch"
        if max(sizes.flat_batch, sizes.heads) > MOST_IN_GRID:
            return f"the kernels of CUDA take at most {MOST_IN_GRID:,} sequences and as many heads"
        return None


def _laid_out(tensor: Tensor) -> Tensor:
    tensor = row_contiguous(tensor)
    rows = zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
    places = (tensor.storage_offset(), *(stride for stride, length in rows if length > 1))
    if all(place * tensor.itemsize % ALIGNED_BYTES == 0 for place in places):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class CudaEfficient(CudaKernel):
    """`_scaled_dot_product_efficient_attention`: the memory-efficient kernel, for any additive mask."""

    name = "memory-efficient, CUDA"
    operators = (efficient_cuda, efficient_cuda_backward)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: OneBlock) -> tuple[Tensor, Tensor, Extras]:
        dtype, queries, additive = query.dtype, query.shape[-2], block.added.tensor
        key, value = repeated(key, query.shape[1]), repeated(value, query.shape[1])
        query, key, value = _as_precise_as(additive, query, key, value)
        output, lse, seed, offset = efficient_cuda(
            query, key, value, _aligned(additive, query, key), True, 0.0, block.is_causal, scale=block.scale
        )
        return output.to(dtype), lse[..., :queries], (lse.shape[-1], seed, offset)

    def backward(self, grad: Tensor, saved: Residuals, extras: Extras, block: OneBlock) -> Gradients:
        query, key, value, output, lse = saved
        dtype, (length, seed, offset), additive = query.dtype, extras, block.added.tensor
        padded = torch.nn.functional.pad(lse, (0, length - lse.shape[-1]), value=torch.inf).contiguous()
        grad, q, k, v, output = _as_precise_as(
            additive, grad, query, repeated(key, query.shape[1]), repeated(value, query.shape[1]), output
        )
        heads_within_rows = output.transpose(1, 2).contiguous().transpose(1, 2)
        dq, dk, dv, _ = efficient_cuda_backward(
            grad, q, k, v, _aligned(additive, q, k), heads_within_rows, padded, seed, offset, 0.0,
            [True, True, True, False], block.is_causal, scale=block.scale,
        )  # fmt: skip
        return dq.to(dtype), summed(dk, key).to(dtype), summed(dv, value).to(dtype)


class CudaCudnn(CudaKernel):
    """`_scaled_dot_product_cudnn_attention`: for half precision, with the masks of flash; torch's choice on Hopper."""

    name = "cuDNN, CUDA"
    operators = (cudnn_cuda, cudnn_cuda_backward)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: OneBlock) -> tuple[Tensor, Tensor, Extras]:
        _require_square(query, key, block)
        output, lse, *rest = cudnn_cuda(query, key, value, None, True, 0.0, block.is_causal, False, scale=block.scale)
        cum_q, cum_k, max_q, max_k, seed, offset, _ = rest
        return output, lse.reshape(query.shape[:-1]), (lse.dim(), cum_q, cum_k, max_q, max_k, seed, offset)

    def backward(self, grad: Tensor, saved: Residuals, extras: Extras, block: OneBlock) -> Gradients:
        query, key, value, output, lse = saved
        rank, cum_q, cum_k, max_q, max_k, seed, offset = extras
        if query.shape[-1] > WIDEST_CUDNN:
            of_flash = (cum_q, cum_k, max_q, max_k, seed, offset)
            return CudaFlash().backward(grad, saved, of_flash, block)
        lse = lse.contiguous()
        dq, dk, dv = cudnn_cuda_backward(
            grad, query, key, value, output, lse if rank == lse.dim() else lse[..., None], seed, offset, None,
            cum_q, cum_k, max_q, max_k, 0.0, block.is_causal, scale=block.scale,
        )  # fmt: skip
        return dq, dk, dv


class CudaFlash(CudaKernel):
    """`_scaled_dot_product_flash_attention`: for half precision. Its one mask is the flag, for as many keys as rows."""

    name = "flash, CUDA"
    operators = (flash_cuda, flash_cuda_backward)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: OneBlock) -> tuple[Tensor, Tensor, Extras]:
        _require_square(query, key, block)
        output, lse, *rest = flash_cuda(query, key, value, 0.0, block.is_causal, False, scale=block.scale)
        cum_q, cum_k, max_q, max_k, seed, offset, _ = rest
        return output, lse, (cum_q, cum_k, max_q, max_k, seed, offset)

    def backward(self, grad: Tensor, saved: Residuals, extras: Extras, block: OneBlock) -> Gradients:
        query, key, value, output, lse = saved
        if not _goes_back(query):
            rows = query.shape[-2]
            length = rows if torch.version.hip else rows + -rows % LSE_ROWS
            unused = torch.zeros((), dtype=torch.int64)  # of dropout, which is 0
            return CudaEfficient().backward(grad, saved, (length, unused, unused), block)
        cum_q, cum_k, max_q, max_k, seed, offset = extras
        dq, dk, dv = flash_cuda_backward(
            grad, query, key, value, output, lse.contiguous(), cum_q, cum_k, max_q, max_k, 0.0, block.is_causal,
            seed, offset, scale=block.scale,
        )  # fmt: skip
        return dq, dk, dv


def _require_square(query: Tensor, key: Tensor, block: OneBlock) -> None:
    assert block.added.tensor is None, "the plan has said so"
    assert not block.is_causal or query.shape[-2] == key.shape[-2], "the plan has said so"


def _goes_back(query: Tensor) -> bool:
    width = query.shape[-1]
    if width not in BACKWARD_OF_DATA_CENTRES:
        return width <= WIDEST_FLASH
    major, minor = capability_of(query.device) or NEWEST
    return (major, minor) == (8, 0) or major in (9, 10)


def _as_precise_as(additive: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of a bias of higher precision: the kernel takes both in one dtype, and in half
    precision a bias would err by several nats (ALiBi's reaches thousands, and bf16 has eight bits)."""
    if additive is None:
        return tensors
    dtype = torch.promote_types(tensors[0].dtype, additive.dtype)
    return tuple(t.to(dtype) for t in tensors)


def _aligned(additive: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Expand a mask to (B, H, T, S), with rows padded in storage to a multiple of 16 elements."""
    if additive is None:
        return None
    length = key.shape[-2]
    padded = torch.nn.functional.pad(additive.to(query.dtype), (0, -length % 16)).contiguous()
    return padded[..., :length].expand(query.shape[0], query.shape[1], query.shape[2], length)
