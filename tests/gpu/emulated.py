"""The operators of torch for CUDA, written out from their contracts, on tensors of the CPU.

Each operator refuses and errs in silence as its kernel does: flash aligns its causal flag with the last key, and reads
the log-sum-exp of its backward from a pointer, as the memory-efficient kernel reads the output. Undefined is NaN.

Sources: torch 2.15, kernel_forward.h and kernel_backward.h of ATen/native/transformers/cuda/mem_eff_attention, and
flash_api.cpp of ATen/native/transformers/cuda/flash_attn.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.call.masks import basic, patterns
from regard.kernels import cuda_kernels, fused, fused_plan

HALF = (torch.float16, torch.bfloat16)


NAMES = {
    "flash_cuda": "_scaled_dot_product_flash_attention",
    "flash_cuda_backward": "_scaled_dot_product_flash_attention_backward",
    "cudnn_cuda": "_scaled_dot_product_cudnn_attention",
    "cudnn_cuda_backward": "_scaled_dot_product_cudnn_attention_backward",
    "efficient_cuda": "_scaled_dot_product_efficient_attention",
    "efficient_cuda_backward": "_scaled_dot_product_efficient_attention_backward",
}
"""From what `regard.kernels.cuda_kernels` calls an operator to its name."""


class Refused(Exception):
    """The kernel would not take this."""


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise Refused(what)


def _require_aligned(*tensors: Tensor) -> None:
    for tensor in tensors:
        rows = [stride for stride, length in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if length > 1]
        steps = [place * tensor.itemsize % 16 for place in (tensor.storage_offset(), *rows)]
        _require(not any(steps), "misaligned address: rows begin at multiples of 16 bytes")


class Operators:
    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self.called: list[str] = []

    # -- flash -----------------------------------------------------------------------------------------

    def _scaled_dot_product_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, is_causal: bool, debug: bool, *, scale: float
    ) -> tuple[Any, ...]:
        self.called.append("flash")
        _require(self.capability >= (8, 0), "FlashAttention only supports Ampere GPUs or newer")
        _require(q.dtype in HALF and dropout == 0.0 and not debug, "dtype, dropout or debug mask")
        self._check(q, k, v)
        _require(q.shape[-1] <= 256, "FlashAttention forward only supports head dimension at most 256")
        scores = _scores(q, k, scale, None, _lower_right(q, k) if is_causal else None)
        output, lse = _attend(scores, v)
        dead = (scores == -torch.inf).all(-1)
        lse = lse.masked_fill(dead, torch.inf)
        seed = torch.zeros((), dtype=torch.int64)
        rows, keys = q.shape[-2], k.shape[-2]
        return output.to(q.dtype), lse.float(), None, None, rows, keys, seed, seed, torch.empty(0)

    def _scaled_dot_product_flash_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, cum_q: None, cum_k: None,
        rows: int, keys: int, dropout: float, is_causal: bool, seed: Tensor, offset: Tensor, *, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        self.called.append("flash backward")
        self._check(q, k, v)
        width = q.shape[-1]
        _require(width <= 256, "FlashAttention backward only supports head dimension at most 256")
        wide = self.capability == (8, 0) or self.capability[0] == 9
        _require(wide or not 192 < width <= 224, "head dim 224 requires A100 or H100")
        _require(grad.stride(-1) == output.stride(-1) == 1, "grad and output must have a contiguous last dimension")
        _require(grad.dtype == output.dtype == q.dtype, "dtypes")
        _require_aligned(grad)
        _require((rows, keys) == (q.shape[-2], k.shape[-2]), "lengths of the forward")
        # The kernel has a pointer alone.
        heads = q.shape[1]
        strides = (heads * rows, rows, 1)
        read = torch.as_strided(lse, (q.shape[0], heads, rows), strides, lse.storage_offset())
        scores = _scores(q, k, scale, None, _lower_right(q, k) if is_causal else None)
        return _back(scores, read, grad, q, k, v, output, scale)

    # -- cuDNN -----------------------------------------------------------------------------------------

    def _scaled_dot_product_cudnn_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, wants_lse: bool, dropout: float, is_causal: bool,
        debug: bool, *, scale: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        self.called.append("cudnn")
        self._check_cudnn(q, k, v)
        _require(
            bias is None and wants_lse and dropout == 0.0 and not debug, "bias, log-sum-exp, dropout or debug mask"
        )
        scores = _scores(q, k, scale, None, _upper_left(q, k) if is_causal else None)
        output, lse = _attend(scores, v)
        seed = torch.zeros((), dtype=torch.int64)
        return (
            output.to(q.dtype), lse.float()[..., None], None, None, q.shape[-2], k.shape[-2], seed, seed,
            torch.empty(0),
        )  # fmt: skip

    def _scaled_dot_product_cudnn_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
        bias: None, cum_q: None, cum_k: None, rows: int, keys: int, dropout: float, is_causal: bool, *, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        self.called.append("cudnn backward")
        self._check_cudnn(q, k, v)
        _require(grad.dtype == output.dtype == q.dtype, "dtypes")
        _require_aligned(grad)
        _require((rows, keys) == (q.shape[-2], k.shape[-2]), "lengths of the forward")
        _require(lse.shape == (*q.shape[:-1], 1) and lse.is_contiguous(), "the log-sum-exp of the forward")
        scores = _scores(q, k, scale, None, _upper_left(q, k) if is_causal else None)
        return _back(scores, lse[..., 0], grad, q, k, v, output, scale)

    def _check_cudnn(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._check(q, k, v)
        _require(self.capability[0] in (9, 10) and q.dtype in HALF, "capability or dtype")
        _require(q.shape[-1] <= 128, "head_dim should be no more than 128")
        _require(k.shape[-2] > 1, "cudnn SDPA does not support key/value sequence length 1")

    # -- memory-efficient ------------------------------------------------------------------------------

    def _scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, wants_lse: bool, dropout: float, is_causal: bool,
        *, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        self.called.append("efficient")
        self._check_efficient(q, k, v, bias)
        _require(wants_lse and dropout == 0.0, "the log-sum-exp is empty")
        scores = _scores(q, k, scale, bias, _upper_left(q, k) if is_causal else None)
        dead = (scores == -torch.inf).all(-1)
        output, lse = _attend(scores, v)
        # The output of a row with no key is not to be read.
        output = output.masked_fill(dead[..., None], torch.nan).transpose(1, 2).contiguous().transpose(1, 2)
        rows = q.shape[-2]
        lse = torch.nn.functional.pad(lse.masked_fill(dead, 0.0), (0, -rows % 32), value=torch.inf)
        seed = torch.zeros((), dtype=torch.int64)
        return output.to(q.dtype), lse.float(), seed, seed

    def _scaled_dot_product_efficient_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, output: Tensor, lse: Tensor,
        seed: Tensor, offset: Tensor, dropout: float, wanted: list[bool], is_causal: bool, *, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        self.called.append("efficient backward")
        self._check_efficient(q, k, v, bias)
        rows = q.shape[-2]
        _require(grad.dtype == output.dtype == q.dtype, "dtypes")
        _require_aligned(grad)
        _require(grad.stride(-1) == output.stride(-1) == 1, "grad and output must have a contiguous last dimension")
        _require(lse.shape == (*q.shape[:2], rows + -rows % 32), "the log-sum-exp must be padded to 32 rows")
        _require(lse.is_contiguous() and lse.dtype == torch.float32, "the log-sum-exp must be contiguous, in float32")
        _require(bool((lse[..., rows:] == torch.inf).all()), "the rows that pad the log-sum-exp must be +inf")
        scores = _scores(q, k, scale, bias, _upper_left(q, k) if is_causal else None)
        if q.dtype in HALF:
            # The kernel has a pointer, and takes the width and the heads alone for the step from row to row.
            strides = (*output.stride()[:2], q.shape[1] * q.shape[3], 1)
            output = torch.as_strided(output, output.shape, strides, output.storage_offset())
        return *_back(scores, lse[..., :rows], grad, q, k, v, output, scale), None

    # -- what they refuse ------------------------------------------------------------------------------

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        _require(q.shape[0] == k.shape[0] == v.shape[0] > 0, "batch size must be positive, and the same")
        _require(max(q.shape[:2]) <= 65_535, "invalid configuration argument: too large a grid")
        _require(min(q.shape[-2], k.shape[-2]) > 0, "empty sequences")
        _require(q.dtype == k.dtype == v.dtype, "dtypes")
        _require(q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0, "a width that is no multiple of 8")
        _require(all(t.stride(-1) == 1 for t in (q, k, v)), "inputs must have a contiguous last dimension")
        _require(k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0, "heads")
        _require_aligned(q, k, v)

    def _check_efficient(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
        self._check(q, k, v)
        _require(q.dtype in (*HALF, torch.float32), "dtype")
        _require(q.dtype != torch.bfloat16 or self.capability >= (8, 0), "bfloat16 needs Ampere or newer")
        _require(q.shape[1] == k.shape[1], "the memory-efficient kernel has no grouped heads")
        if bias is None:
            return
        _require(bias.shape == (*q.shape[:3], k.shape[2]), "the shape of attn_bias")
        _require(bias.dtype == q.dtype, "attn_bias must have the dtype of the query")
        strides = zip(bias.stride()[:3], bias.shape[:3], strict=True)
        _require(all(n <= 1 or stride % 8 == 0 for stride, n in strides), "attn_bias is not correctly aligned")
        _require(bias.stride(-1) == 1 or bias.shape[-1] == 1, "attn_bias must have a contiguous last dimension")
        _require(bias.storage_offset() * bias.itemsize % 16 == 0, "the pointer of attn_bias is not correctly aligned")


def _positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])


def _upper_left(q: Tensor, k: Tensor) -> Tensor:
    i, j = _positions(q, k)
    return j <= i


def _lower_right(q: Tensor, k: Tensor) -> Tensor:
    i, j = _positions(q, k)
    return j <= i + k.shape[-2] - q.shape[-2]


def _scores(q: Tensor, k: Tensor, scale: float, bias: Tensor | None, allowed: Tensor | None) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = scale * (q.double() @ k.double().mT)
    scores = scores if bias is None else scores + bias.double()
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def _attend(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    v = v.double().repeat_interleave(scores.shape[1] // v.shape[1], 1)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def _back(
    scores: Tensor, lse: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    group, dtype = q.shape[1] // k.shape[1], q.dtype
    q, k, v, grad, output = (t.double() for t in (q, k, v, grad, output))
    k_, v_ = (t.repeat_interleave(group, 1) for t in (k, v))
    weights = (scores - lse.double()[..., None]).exp()
    d_weights = grad @ v_.mT
    d_scores = weights * (d_weights - (grad * output).sum(-1, keepdim=True))
    d_query, d_key, d_value = scale * (d_scores @ k_), scale * (d_scores.mT @ q), weights.mT @ grad
    d_key, d_value = (t.unflatten(1, (-1, group)).sum(2) for t in (d_key, d_value))
    return d_query.to(dtype), d_key.to(dtype), d_value.to(dtype)


@contextmanager
def emulated_cuda(
    *, capability: tuple[int, int] = (9, 0), looks: bool = False, cudnn: bool = False
) -> Iterator[Operators]:
    """Calls of the backend "fused" go to the kernels of CUDA as they stand here.

    Args:
        capability: of the GPU.
        looks: whether values of tensors may decide what is computed. They may not on a GPU.
        cudnn: whether torch has a version of cuDNN whose kernel it prefers; then also for two queries.
    """
    operators = Operators(capability)
    with pytest.MonkeyPatch.context() as patch:
        for ours, theirs in NAMES.items():
            patch.setattr(
                cuda_kernels, ours, lambda *args, _name=theirs, **named: getattr(operators, _name)(*args, **named)
            )
        patch.setattr(fused, "kernel_for", cuda_kernels.cuda_kernel)
        patch.setattr(cuda_kernels, "capability_of", lambda device: capability)
        patch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        patch.setattr(torch.backends.cudnn, "is_available", lambda: cudnn)
        patch.setattr(torch.backends.cudnn, "version", lambda: 91_900)
        patch.setattr(cuda_kernels, "FEWEST_OF_CUDNN", 2)
        if not looks:
            for module in (fused_plan, basic, patterns):
                patch.setattr(module, "can_look", lambda tensor: False)
        yield operators
