"""The interface of fused kernels: a forward that returns the log-sum-exp, and a backward for its gradient.

The kernel of the CPU is here, those of CUDA are in `regard.kernels.cuda_kernels`.

torch's public function hides the log-sum-exp (lse) of its kernels, and accepts no gradient for it. Here each kernel is
called through the operator with the lse as a result. The gradient of the lse goes through the kernel's own backward as
one more column: with q and k extended by 0, v by 1, out by 0 and grad_out by dlse, the operator computes dS = P * (dO
v^T - delta) + P * dlse.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.call.shapes import Sizes, repeated
from regard.tensors.guards import is_compiling
from regard.tensors.memory import row_contiguous
from regard.tensors.torch_private import CPU_TAKES_GROUPS, flash_cpu, flash_cpu_alone, flash_cpu_backward

Extras = tuple[Any, ...]
Residuals = tuple[Tensor, ...]
Gradients = tuple[Tensor, Tensor, Tensor]
HALF = (torch.float16, torch.bfloat16)
SHORT = 256
"""Up to so many queries the half-precision backward is faster in float32 (docs/design/choices.md)."""


CHUNK_ELEMENTS = 1 << 18
"""The pairs rendered together: 1 MiB in float32, and 2 MiB for each index tensor of a predicate."""


@dataclass(frozen=True, slots=True, eq=False)
class AdditiveMask:
    tensor: Tensor | None
    """(B or 1, H or 1, t or 1, s), -inf for excluded pairs; None for zero."""
    live: Tensor | None
    """The rows with a key: bool (B or 1, H or 1, t or 1); None for all."""


NOTHING_ADDED = AdditiveMask(None, None)


class Buffer:
    """Memory for successive masks, one after the other: a predicate allocates several 8-byte indices for each pair,
    and an allocator may keep the memory of every freed block. So a pass over blocks renders few pairs at a time."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def like(self, piece: Tensor, rows: int) -> Tensor:
        """An uninitialised tensor like `piece` (B or 1, H or 1, t, s), but with so many rows."""
        shape = (*piece.shape[:2], rows, piece.shape[-1])
        count = math.prod(shape)
        if self._memory is None or self._memory.numel() < count or self._memory.dtype != piece.dtype:
            self._memory = None  # Free the old memory before allocating the new.
            self._memory = piece.new_empty(count)
        return self._memory[:count].view(shape)


def by_chunks(
    chunks: Iterator[range], count: int, render: Callable[[range], Tensor | None], buffer: Buffer | None
) -> AdditiveMask:
    """The additive mask of `count` queries, from masks (..., t, s) of some of them; None from `render` is zeros."""
    whole: Tensor | None = None
    live = torch.ones(1, 1, count, dtype=torch.bool)
    for rows in chunks:
        piece = render(rows)
        if piece is None:
            if whole is not None:
                whole[:, :, rows.start : rows.stop] = 0.0
            continue
        if whole is None:
            whole = (buffer or Buffer()).like(piece, count)
            whole[:, :, : rows.start] = 0.0
            live = live.repeat(*piece.shape[:2], 1)
        whole[:, :, rows.start : rows.stop] = piece
        live[:, :, rows.start : rows.stop] = (piece > -torch.inf).any(-1)
    return AdditiveMask(whole, None if bool(live.all()) else live)


class Kernel(ABC):
    """A fused kernel: `forward` returns the output, the lse, and extras for `backward`."""

    name: ClassVar[str]
    operators: ClassVar[tuple[Any, ...]]
    multiple: ClassVar[int] = 1
    """The widths of the vectors must be multiples of this."""

    def refuses(self, sizes: Sizes) -> str | None:
        return None

    def laid_out(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Vectors (..., D) in the memory layout assumed by the kernel: the same tensors, or copies."""
        for tensor in tensors:
            if not tensor.is_contiguous():
                return tuple(map(row_contiguous, tensors))
        return tensors

    def arguments(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """Query, key, value and scale as it takes them: of one dtype and width, laid out in memory, scale above 0.

        >>> tensors = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 5)
        >>> query, key, value, scale = CPU_FLASH.arguments(*tensors, -0.5)
        >>> query.shape, value.shape, scale
        (torch.Size([2, 5]), torch.Size([4, 5]), 0.5)
        """
        dtype, width, multiple = query.dtype, query.shape[-1], self.multiple
        if key.dtype != dtype or value.dtype != dtype:
            key, value = key.to(dtype), value.to(dtype)
        if value.shape[-1] != width or key.shape[-1] != width or (multiple > 1 and width % multiple):
            query, key, value = one_width(query, key, value, multiple=multiple)
        if scale <= 0:
            query, scale = with_positive_scale(query, scale)
        # Last, because the negative of a tensor may have another memory layout.
        query, key, value = self.laid_out(query, key, value)
        return query, key, value, scale

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: "OneBlock") -> tuple[Tensor, Tensor, Extras]:
        """The output (B, H, t, E), the lse (B, H, t), and the kernel's own extras."""

    @abstractmethod
    def backward(self, grad: Tensor, saved: Residuals, extras: Extras, block: "OneBlock") -> Gradients:
        """The gradients of query, key and value, from saved = (query, key, value, output, lse)."""


class CpuFlash(Kernel):
    """`_scaled_dot_product_flash_attention_for_cpu`: the kernel of F.scaled_dot_product_attention on CPU."""

    name = "flash, CPU"
    operators = (flash_cpu, flash_cpu_backward)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: "OneBlock") -> tuple[Tensor, Tensor, Extras]:
        if not CPU_TAKES_GROUPS:
            key, value = repeated(key, query.shape[1]), repeated(value, query.shape[1])
        # torch's own binding takes half the time of the operator's, which a graph needs.
        flash = flash_cpu if is_compiling() else flash_cpu_alone
        output, lse = flash(query, key, value, 0.0, block.is_causal, attn_mask=block.added.tensor, scale=block.scale)
        return output, lse, ()

    def backward(self, grad: Tensor, saved: Residuals, extras: Extras, block: "OneBlock") -> Gradients:
        query, key, value, *rest = saved
        dtype, additive, given = query.dtype, block.added.tensor, (grad, *saved)
        if not CPU_TAKES_GROUPS:
            given = (grad, query, repeated(key, query.shape[1]), repeated(value, query.shape[1]), *rest)
        if dtype in HALF and query.shape[-2] <= SHORT:
            # On 110 sentences of 17 tokens the operator takes 15 ms in bf16, and 1.7 ms in float32 including the casts.
            given, additive = tuple(t.float() for t in given), None if additive is None else additive.float()
        dq, dk, dv = flash_cpu_backward(*given, 0.0, block.is_causal, attn_mask=additive, scale=block.scale)
        return dq.to(dtype), summed(dk.to(dtype), key), summed(dv.to(dtype), value)


CPU_FLASH = CpuFlash()


@dataclass(frozen=True, slots=True, eq=False)
class OneBlock:
    kernel: Kernel
    scale: float
    is_causal: bool
    added: AdditiveMask

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Extras]:
        """The output, the lse (-inf on rows without keys) and the kernel's extras."""
        output, lse, extras = self.kernel.forward(query, key, value, self)
        live = self.added.live
        if live is not None:
            # Kernels disagree on rows without keys (lse is 0.0 on CPU, +inf in flash): find them by the mask.
            lse = lse.masked_fill(~live, -torch.inf)
            output = output if isinstance(self.kernel, CpuFlash) else output.masked_fill(~live[..., None], 0.0)
        return output, lse, extras

    def backward(
        self, saved: Residuals, extras: Extras, grad_output: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, ...]:
        query, key, value, output, lse = saved
        dim = query.shape[-1]
        if self.added.live is not None:
            dead = lse == -torch.inf
            # With lse = +inf the weights of a row without keys are exp(-inf) = 0 again, for every kernel's convention.
            lse = lse.masked_fill(dead, torch.inf)
            grad_output = grad_output.masked_fill(dead[..., None], 0.0)
            grad_lse = None if grad_lse is None else grad_lse.masked_fill(dead, 0.0)
        kernel = self.kernel
        if grad_lse is not None:
            # `backward` reads the row sums of weights times their gradients from the output and its gradient: a further
            # column of both carries the gradient of the lse.
            extra = kernel.multiple
            query, key, output = (wider(t, extra) for t in (query, key, output))
            value = wider(wider(value, 1, 1.0), extra - 1)
            grad_output = wider(torch.cat([grad_output, grad_lse[..., None].to(grad_output.dtype)], -1), extra - 1)
        grads = kernel.backward(grad_output, (query, key, value, output, lse), extras, self)
        return grads if grad_lse is None else tuple(g[..., :dim] for g in grads)


def one_width(*tensors: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Tensors (..., D), zero-padded to the greatest width, rounded up to a multiple of `multiple`.

    Zero columns change neither the scores nor the other columns of the output.

    >>> [tuple(t.shape) for t in one_width(torch.ones(2, 3), torch.ones(2, 5), multiple=4)]
    [(2, 8), (2, 8)]
    """
    width = max(t.shape[-1] for t in tensors)
    width += -width % multiple
    return tuple(t if t.shape[-1] == width else torch.nn.functional.pad(t, (0, width - t.shape[-1])) for t in tensors)


def with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The query times the sign of the scale, or 0. torch's kernels give an excluded key the score -inf and multiply by
    the scale afterwards: with 0 or below, an excluded key would get NaN or the largest score (torch 2.13, on the
    CPU)."""
    if scale > 0:
        return query, scale
    return (-query, -scale) if scale < 0 else (query * 0.0, 1.0)


def wider(tensor: Tensor, columns: int, value: float = 0.0) -> Tensor:
    """A tensor (..., D) with more columns, contiguous, as the kernels assume: torch pads one with a channels-last
    reading, such as one column of many heads, into channels-last memory."""
    return row_contiguous(torch.nn.functional.pad(tensor, (0, columns), value=value))


def summed(grad: Tensor, tensor: Tensor) -> Tensor:
    return grad if grad.shape[1] == tensor.shape[1] else grad.unflatten(1, (tensor.shape[1], -1)).sum(2)
