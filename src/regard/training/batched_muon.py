"""Muon whose matrices of one shape are made orthogonal together, in float32 or in bfloat16."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
                means = [self._mean(weight, group["momentum"]) for weight in weights]
                for weight, update in zip(weights, all_nearly_orthogonal(means, self._dtype), strict=True):
                    weight.mul_(1 - rate * decay)
                    weight.add_(update, alpha=-0.2 * rate * sqrt(max(weight.shape)))
        return loss

    def _mean(self, weight: Tensor, momentum: float) -> Tensor:
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
    a, b, c = COEFFICIENTS
    first = matrices[0]
    is_tall = first.shape[0] > first.shape[1]
    given = first[None] if len(matrices) == 1 else torch.stack(list(matrices))
    # The squares of a gradient may be beyond half precision, so that its length is taken in float32.
    x = (given.mT if is_tall else given).to(torch.promote_types(first.dtype, torch.float32))
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_min(1e-7)
    x = x.to(first.dtype if first.dtype == torch.float64 else dtype)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(first.dtype).unbind()
