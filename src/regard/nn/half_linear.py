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
    """The rows, and rows of zeros up to a common size.

    >>> filled_up(torch.ones(100, 2)).sum(0), filled_up(torch.ones(100, 2)).shape
    (tensor([100., 100.]), torch.Size([128, 2]))
    """
    count = len(rows)
    size = common_size(count)
    if size == count:
        return rows
    whole = rows.new_empty(size, rows.shape[1])
    whole[:count] = rows
    whole[count:] = 0
    return whole


def half_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in bfloat16, for tensors of the CPU in bfloat16 or float32.

    >>> x, weight = torch.randn(300, 7), torch.randn(5, 7)
    >>> torch.equal(half_linear(x, weight, None), x.bfloat16() @ weight.bfloat16().T)
    True
    """
    answer: Tensor = _HalfLinear.apply(x.bfloat16(), weight.bfloat16(), None if bias is None else bias.bfloat16())
    return answer


class _HalfLinear(torch.autograd.Function):
    """x W^T + b for tensors in bfloat16; their gradients can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows, matrix = filled_up(x.reshape(-1, x.shape[-1])), weight.t()
        answer = torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)
        # A view could not be changed in place, as `F.linear`'s answer can.
        return answer.resize_(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        rows = filled_up(flat)
        return (
            (rows @ weight)[: len(flat)].view_as(x) if of_x else None,
            rows.t() @ filled_up(x.reshape(-1, x.shape[-1])) if of_weight else None,
            flat.sum(0) if of_bias else None,
        )
