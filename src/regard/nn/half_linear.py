"""Linear layers under bfloat16 autocast on a CPU, whose products have few different sizes.

oneDNN compiles code for every size of a bfloat16 product that it meets, which takes 2.6 ms and a megabyte of memory
each time on an Intel Xeon with AMX. Batches of sentences have another number of rows each time, so that a sixth of a
training went into code that was used once (docs/design/products.md). Here rows are cut at a size that many batches
share, and what is left is filled with zeros to such a size.
"""

from typing import Any

import torch
from torch import Tensor

LEAST_ROWS = 128
"""The number of rows that the smallest product has."""
SIZES_OF_AN_OCTAVE = 16
"""How many different numbers of rows there are between a power of two and the next."""


def rows_of_a_step(rows: int) -> int:
    """The number of rows whose multiples are the common sizes for so many rows.

    >>> [rows_of_a_step(rows) for rows in (5, 2_047, 4_096, 8_191)]
    [128, 128, 256, 256]
    """
    octave: int = 1 << max(rows, 1).bit_length() - 1
    return max(LEAST_ROWS, octave // SIZES_OF_AN_OCTAVE)


def pieces(rows: Tensor) -> list[Tensor]:
    """The rows in one or two pieces of common sizes; the second one ends with rows of zeros.

    >>> [tuple(piece.shape) for piece in pieces(torch.ones(300, 7))]
    [(256, 7), (128, 7)]
    """
    step = rows_of_a_step(len(rows))
    whole = len(rows) - len(rows) % step
    if whole == len(rows):
        return [rows]
    rest = rows.new_zeros(step, rows.shape[1])
    rest[: len(rows) - whole] = rows[whole:]
    return [rows[:whole], rest] if whole else [rest]


def product(rows: list[Tensor], matrix: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """The product of `count` rows, given in pieces, with a matrix (K, N); `bias` (N,) is added to each row."""
    answer = matrix.new_empty(count, matrix.shape[1])
    start = 0
    for piece in rows:
        into = answer[start : start + len(piece)]
        # A piece that ends with rows of zeros has more rows than there is room for.
        out = into if len(into) == len(piece) else matrix.new_empty(len(piece), matrix.shape[1])
        if bias is None:
            torch.mm(piece, matrix, out=out)
        else:
            torch.addmm(bias, piece, matrix, out=out)
        if out is not into:
            into.copy_(out[: len(into)])
        start += len(piece)
    return answer


def half_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in bfloat16, for tensors of the CPU in bfloat16 or float32.

    >>> x, weight = torch.randn(300, 7), torch.randn(5, 7)
    >>> torch.equal(half_linear(x, weight, None), x.bfloat16() @ weight.bfloat16().T)
    True
    """
    answer: Tensor = _HalfLinear.apply(x.bfloat16(), weight, bias)
    return answer


class _HalfLinear(torch.autograd.Function):
    """x W^T + b for x in bfloat16. The gradients of W and b are summed in float32, if that is their dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, half = x.reshape(-1, x.shape[-1]), weight.bfloat16()
        ctx.save_for_backward(x, weight, half)
        ctx.bias_dtype = None if bias is None else bias.dtype
        with torch.autocast("cpu", enabled=False):
            answer = product(pieces(rows), half.mT, None if bias is None else bias.bfloat16(), len(rows))
        return answer.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, half = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows, flat = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        if torch.is_grad_enabled():  # the gradients will be differentiated: autograd has to see what they are made of
            return (
                (flat @ weight.bfloat16()).view_as(x) if of_x else None,
                (flat.mT @ rows).to(weight.dtype) if of_weight else None,
                flat.sum(0, dtype=ctx.bias_dtype) if of_bias else None,
            )
        cut = pieces(flat)
        return (
            product(cut, half, None, len(flat)).view_as(x) if of_x else None,
            _sum_of_products(cut, pieces(rows), weight.dtype) if of_weight else None,
            flat.sum(0, dtype=ctx.bias_dtype) if of_bias else None,
        )


def _sum_of_products(left: list[Tensor], right: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of A^T B over pieces of two matrices, added up in a dtype."""
    total, *others = ((a.mT @ b).to(dtype) for a, b in zip(left, right, strict=True))
    for other in others:
        total += other
    return total
