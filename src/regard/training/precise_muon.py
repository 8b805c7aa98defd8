"""Muon whose steps of Newton and Schulz are computed in the precision of the parameters."""

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor


class PreciseMuon(torch.optim.Muon):
    """`torch.optim.Muon` in float32: where a processor has no fast products in bfloat16, it takes half the time.

    The update is that of torch's with `adjust_lr_fn="match_rms_adamw"`, and so are groups and states:
    0.2 sqrt(max(rows, columns)) times the mean of the gradients made nearly orthogonal.

    >>> weight = torch.nn.Parameter(torch.eye(2))
    >>> optimizer = PreciseMuon([weight], lr=0.1, weight_decay=0.0)
    >>> weight.grad = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> optimizer.step()
    >>> (weight < 0).tolist()
    [[False, True], [True, False]]
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; `closure`, if there is one, computes the loss and the gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            momentum, rate = group["momentum"], group["lr"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                mean = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight.grad))
                mean.lerp_(weight.grad, 1 - momentum)
                update = weight.grad.lerp(mean, momentum) if group["nesterov"] else mean
                update = nearly_orthogonal(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(update, alpha=-rate * 0.2 * sqrt(max(weight.shape)))
        return loss


def nearly_orthogonal(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float = 1e-7
) -> Tensor:
    r"""U s(S) V^T for a matrix U S V^T, where s is near 1: steps of Newton and Schulz.

    $$X_0 = G / \lVert G \rVert_F, \quad X_{k+1} = a X_k + (b A + c A^2) X_k, \quad A = X_k X_k^\top$$

    Args:
        matrix: of any two sizes.
        coefficients: a, b and c.
        steps: how many.
        eps: the least norm that the matrix is divided by.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".

    >>> matrix = torch.tensor([[3.0, 0.0], [0.0, -0.5]])
    >>> nearly_orthogonal(matrix, (1.5, -0.5, 0.0), steps=10).round(decimals=3)
    tensor([[ 1.,  0.],
            [ 0., -1.]])
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x / x.norm().clamp_min(eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
