"""Muon whose matrices of one shape are made orthogonal together, in float32 or in bfloat16."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from regard.errors import ArgumentError
from regard.ranges import require_at_least

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Those of Jordan et al.: five steps bring singular values to 0.68 to 1.13, but for those far below the largest."""
STEPS = 5
FAR_FROM_SQUARE = 1.5
"""Where one side is so many times the other, steps on the Gram matrix alone need fewer products than those on all."""
TOGETHER = 1 << 22
"""The numbers that are made orthogonal together at most: beyond it one matrix keeps a processor busy by itself."""


class BatchedMuon(torch.optim.Optimizer):
    r"""Muon that makes matrices of one shape orthogonal by one batch of products.

    $$B \leftarrow \mu B + (1 - \mu) G, \quad
    W \leftarrow (1 - \eta \lambda) W - 0.2 \eta \sqrt{\max(n, m)} \; \mathrm{orth}((1 - \mu) G + \mu B)$$

    It is `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` and can go on from its states. torch's goes matrix by
    matrix, and always in bfloat16.

    Args:
        params: matrices (n, m), or groups of them.
        lr: the learning rate eta.
        weight_decay: lambda.
        momentum: mu, the share that the mean of the gradients keeps in each step.
        dtype: what the products are computed in, but float64 for matrices of it. bfloat16, which torch's takes, is for
            processors that multiply it faster.

    Raises:
        ArgumentError: a parameter is no matrix of real numbers, or a number is below 0.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the scale is that of Liu et
    al. 2025 (arXiv:2502.16982), section 2.2.

    >>> weight = torch.nn.Parameter(torch.eye(2))
    >>> optimizer = BatchedMuon([weight], lr=0.1, weight_decay=0.0)
    >>> weight.grad = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> optimizer.step()
    >>> (weight < 0).tolist()
    [[False, True], [True, False]]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        require_at_least(0, lr=lr, weight_decay=weight_decay, momentum=momentum)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._dtype = dtype
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.ndim != 2 or not weight.is_floating_point():
                    raise ArgumentError(
                        "Muon is for matrices of real numbers, got a parameter "
                        f"{tuple(weight.shape)} in {weight.dtype}: give it to AdamW"
                    )

    def __getstate__(self) -> dict[str, Any]:
        """What a copy is made of."""
        return {**super().__getstate__(), "_dtype": self._dtype}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; `closure`, if there is one, computes the loss and the gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate, decay = group["lr"], group["weight_decay"]
            for weights in alike([weight for weight in group["params"] if weight.grad is not None]):
                scale = -0.2 * rate * sqrt(max(weights[0].shape))
                updates = _stack_of_nearly_orthogonal(weights, self._dtype, partial(self._mean, group["momentum"]))
                for weight, update in zip(weights, updates, strict=True):
                    if decay:
                        weight.mul_(1 - rate * decay)
                    weight.add_(update, alpha=scale)
        return loss

    def _mean(self, momentum: float, weight: Tensor) -> Tensor:
        """The gradient, and the mean of all before it, looked at one step ahead (Nesterov)."""
        assert weight.grad is not None
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight.grad)
        mean = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
        return weight.grad.lerp(mean, momentum)


def alike(matrices: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The matrices in groups of one shape, dtype and device, of at most `TOGETHER` numbers or of one matrix.

    >>> [len(group) for group in alike([torch.eye(2), torch.zeros(2, 3), torch.ones(2, 2)])]
    [2, 1]
    """
    kinds = defaultdict[Any, list[Tensor]](list)
    for matrix in matrices:
        kinds[matrix.shape, matrix.dtype, matrix.device].append(matrix)
    for group in kinds.values():
        size = max(TOGETHER // max(group[0].numel(), 1), 1)
        yield from (group[start : start + size] for start in range(0, len(group), size))


def all_nearly_orthogonal(matrices: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Sequence[Tensor]:
    r"""Of each matrix U S V^T of one shape U s V^T, where s is nearer to 1 than S: five steps of Newton and Schulz.

    $$X_0 = G / \lVert G \rVert_F, \quad X_{k+1} = a X_k + (b A + c A^2) X_k, \quad A = X_k X_k^\top$$

    Args:
        matrices: all (n, m).
        dtype: what the products are computed in, but float64 for matrices of it.

    >>> all_nearly_orthogonal([torch.tensor([[3.0, 0.0], [0.0, -0.5]])])[0].round().tolist()
    [[1.0, 0.0], [0.0, -1.0]]
    """
    return _stack_of_nearly_orthogonal(matrices, dtype).to(matrices[0].dtype).unbind()


def _stack_of_nearly_orthogonal(
    matrices: Sequence[Tensor], dtype: torch.dtype, made_of: Callable[[Tensor], Tensor] = torch.Tensor.detach
) -> Tensor:
    """What is `made_of` each matrix, nearly orthogonal, in a new tensor (matrices, n, m) of the dtype of the products.

    One is made at a time, so that it is in the processor's cache until its place in the stack is written.
    """
    first = matrices[0]
    x = first.new_empty((len(matrices), *first.shape), dtype=first.dtype if first.dtype == torch.float64 else dtype)
    for place, matrix in zip(x, matrices, strict=True):
        # The squares of a gradient may be beyond half precision, so that its length is taken in float32.
        made = made_of(matrix).to(torch.promote_types(first.dtype, torch.float32))
        torch.div(made, torch.linalg.vector_norm(made).clamp_min(1e-7), out=place)
    spare = torch.empty_like(x)
    for steps in _steps_at_once(x):
        x, spare = _after(x, steps, spare), x
    return x


def _steps_at_once(x: Tensor) -> tuple[int, ...]:
    """How many steps are made on the Gram matrices before the matrices themselves are multiplied again.

    Rounding makes a Gram matrix drift from that of its matrix, so that small singular values grow too far: by three
    steps not yet in float32, by five a hundredfold of what rounding costs anyway, and in bfloat16 by two.
    """
    short, long = sorted(x.shape[1:])
    return (3, 2) if long > FAR_FROM_SQUARE * short and torch.finfo(x.dtype).eps < 1e-6 else (1,) * STEPS


def _after(x: Tensor, steps: int, out: Tensor) -> Tensor:
    r"""The matrices after so many steps, written into `out`, by products of their Gram matrices, which are smaller.

    A step multiplies by P = a I + R where R = b A + c A^2, and makes A P^2 of A. The product of all P's is a^k I + Q:
    a multiple of I stands apart, as bfloat16 has too few digits for both.

    Tall matrices (n > m) are multiplied from the right, where A is X^T X, so that none is copied into its transpose.
    """
    a, b, c = COEFFICIENTS
    is_tall = x.shape[1] > x.shape[2]
    gram = x.mT @ x if is_tall else x @ x.mT
    share, rest = 1.0, gram
    for step in range(steps):
        r = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        rest = torch.baddbmm(rest, rest, r, beta=a).add_(r, alpha=share) if step else r
        share *= a
        if step + 1 < steps:
            once = torch.baddbmm(gram, gram, r, beta=a)
            gram = torch.baddbmm(once, once, r, beta=a)
    left, right = (x, rest) if is_tall else (rest, x)
    return torch.baddbmm(x, left, right, beta=share, out=out)
