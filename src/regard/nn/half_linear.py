"""Linear layers under bfloat16 autocast on a CPU, whose products have few different sizes.

oneDNN compiles code for every size of a bfloat16 product that it meets, which takes 2.6 ms and a megabyte of memory
each time on an Intel Xeon with AMX. Batches of sentences have another number of rows each time, so that a sixth of a
training went into code that was used once (docs/design/products.md). Here rows of zeros follow, up to a number that
many batches share.
"""

from typing import Any

import torch
from torch import Tensor

LEAST_ROWS = 128
"""The number of rows that the smallest product has."""
SIZES_OF_AN_OCTAVE = 16
"""How many different numbers of rows there are between a power of two and the next."""


def common_size(rows: int) -> int:
    """The least number that many batches share, and that is not below `rows`.

    >>> [common_size(rows) for rows in (5, 1_950, 4_000, 4_097)]
    [128, 2048, 4096, 4352]
    """
    octave: int = 1 << max(rows, 1).bit_length() - 1
    step = max(LEAST_ROWS, octave // SIZES_OF_AN_OCTAVE)
    return -(-rows // step) * step


def filled_up(rows: Tensor) -> Tensor:
    """The rows in bfloat16, and rows of zeros up to a common size.

    >>> filled_up(torch.ones(100, 2)).sum(0), filled_up(torch.ones(100, 2)).shape
    (tensor([100., 100.], dtype=torch.bfloat16), torch.Size([128, 2]))
    """
    count = len(rows)
    size = common_size(count)
    if size == count:
        return rows.bfloat16()
    whole = rows.new_empty(size, rows.shape[1], dtype=torch.bfloat16)
    whole[:count] = rows
    whole[count:] = 0
    return whole


def half_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in bfloat16, for tensors of the CPU in bfloat16 or float32.

    >>> x, weight = torch.randn(300, 7), torch.randn(5, 7)
    >>> torch.equal(half_linear(x, weight, None), x.bfloat16() @ weight.bfloat16().T)
    True
    """
    rows = x.reshape(-1, x.shape[-1])
    is_filled = rows.dtype == torch.bfloat16 and len(rows) == common_size(len(rows))
    answer: Tensor = _HalfLinear.apply(
        rows if is_filled else _Filled.apply(rows),
        weight.bfloat16(),
        None if bias is None else bias.bfloat16(),
        (*x.shape[:-1], len(weight)),
    )
    return answer


class _Filled(torch.autograd.Function):
    """Rows in bfloat16, and rows of zeros up to a common size: one pass for both."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.count, ctx.dtype = len(rows), rows.dtype
        return filled_up(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad[: ctx.count].to(ctx.dtype)


class _HalfLinear(torch.autograd.Function):
    """x W^T + b for rows and tensors in bfloat16, in a given shape; their gradients can be differentiated."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        answer = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
        # A view could not be changed in place, as `F.linear`'s answer can.
        return answer.resize_(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias, _ = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        grads = filled_up(flat)
        return (
            grads @ weight if of_rows else None,
            grads.t() @ rows if of_weight else None,
            flat.sum(0) if of_bias else None,
            None,
        )
