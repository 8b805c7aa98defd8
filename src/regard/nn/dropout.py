"""Dropout with cheap random bits: on a CPU, `torch.nn.Dropout` spends most of its time on them."""

from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.nn.dropout_decisions import Decisions, decide, of_masked_relu
from regard.tensors.guards import is_compiling


class Dropout(nn.Module):
    r"""Zeroes each element with probability p during training, and divides the others by 1 - p.

    Args:
        p: in [0, 1), rounded to a multiple of 1/65,536. The divisor is the exact probability after rounding, so the
            expectation is unchanged.

    On a CPU the bits come as whole random words (four decisions from each word), about four times as fast as
    `torch.nn.Dropout`; the random stream differs from torch's. If numba is installed (`regard[fast]`), tensors of at
    least 65,536 elements in float32 or bfloat16 take one pass of compiled code, which derives the bits from two drawn
    keys and stores none. On other devices, and when compiled, it is `torch.nn.Dropout`.

    Raises:
        ArgumentError: the probability is outside [0, 1).

    Source: Srivastava et al. 2014 (JMLR 15, 1929-1958), section 4, in the inverted form.

    >>> dropped = Dropout(0.25)(torch.ones(10_000))
    >>> sorted({round(float(x), 4) for x in dropped.unique()}), 0.2 < float((dropped == 0).float().mean()) < 0.3
    ([0.0, 1.3333], True)
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ArgumentError(f"dropout needs a probability in [0, 1), got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        if _leaves_it_to_torch(x):
            return nn.functional.dropout(x, self.p)
        return _Masked.apply(x, decide(x, self.p), x.dtype)

    def relu(self, x: Tensor) -> Tensor:
        """`dropout(relu(x))` with the same bits. Only the result is saved: its positive elements are the kept ones."""
        if not self.training or not self.p:
            return torch.relu(x)
        if _leaves_it_to_torch(x):
            return self(nn.functional.relu(x))
        return masked_relu(x, decide(x, self.p))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """`x + dropout(y)` with the same bits, in one pass fewer."""
        if not self.training or not self.p:
            return x + y
        if _leaves_it_to_torch(y) or x.shape != y.shape:
            return x + self(y)
        return _MaskedSum.apply(x, y, decide(y, self.p))

    def extra_repr(self) -> str:
        return f"p={self.p}"


def masked_relu(x: Tensor, decisions: Decisions) -> Tensor:
    """Give max(x, 0) kept scale. Only the result is saved for the gradient, itself differentiable.

    >>> masked_relu(torch.tensor([-1.0, 3.0]), decide(torch.ones(2), 0.0))
    tensor([0., 3.])
    """
    answer: Tensor = _MaskedRelu.apply(x, decisions)
    return answer


def _leaves_it_to_torch(x: Tensor) -> bool:
    return x.device.type != "cpu" or is_compiling()


class _Masked(torch.autograd.Function):
    """x kept scale, in a dtype. Only the decisions are saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, decisions: Decisions, dtype: torch.dtype) -> Tensor:
        tensors, ctx.again = decisions.parts()
        ctx.save_for_backward(*tensors)
        ctx.dtype = x.dtype
        return decisions.masked(x, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Masked.apply(grad, ctx.again(*ctx.saved_tensors), ctx.dtype), None, None


class _MaskedRelu(torch.autograd.Function):
    """max(x, 0) kept scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, decisions: Decisions) -> Tensor:
        answer = decisions.masked_relu(x)
        ctx.save_for_backward(answer)
        ctx.scale = decisions.scale
        return answer

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (answer,) = ctx.saved_tensors
        return of_masked_relu(grad, answer, ctx.scale), None


class _MaskedSum(torch.autograd.Function):
    """x + y kept scale, in the wider of their dtypes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, decisions: Decisions) -> Tensor:
        tensors, ctx.again = decisions.parts()
        ctx.save_for_backward(*tensors)
        ctx.dtypes = x.dtype, y.dtype
        return decisions.masked_sum(x, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        of_x, of_y = ctx.dtypes
        return grad.to(of_x), _Masked.apply(grad, ctx.again(*ctx.saved_tensors), of_y), None
