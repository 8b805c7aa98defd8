"""Losses as a sum and a count, for the mean over all tokens of a step on any number of ranks."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

import regard.call  # noqa: F401 (so that the first exponential is made by one thread)
from regard.errors import ArgumentError, ShapeError

ROWS_AT_A_TIME = 64
"""Rows of logits processed at a time: 64 rows of 8,000 elements in float32 are 2 MB and stay in the cache."""


@dataclass(frozen=True, slots=True)
class LossSum:
    """A summed loss and the number of tokens in the sum; the mean is `total / count`."""

    total: Tensor
    count: Tensor


def cross_entropy(
    logits: Float[Tensor, "... V"],
    targets: Int[Tensor, "..."],
    *,
    ignore_index: int,
    label_smoothing: float = 0.0,
) -> LossSum:
    """Summed cross-entropy with label smoothing, in nats, over all targets except `ignore_index`.

    loss = sum over rows of lse(z) - (1 - e) * z[target] - e * mean(z)

    This is the cross-entropy against the target (1 - e) * onehot(target) + e / V, without building that target. The
    sums are taken in float32 (float64 for float64 logits), block by block, without a second copy of bf16 logits in
    float32.

    Args:
        logits: scores before the softmax, V of them for each target.
        targets: indices in 0..V-1, or `ignore_index` for no prediction.
        ignore_index: the padding index, which has no loss and no gradient.
        label_smoothing: the share e in 0..1 of the target's mass spread over all V.

    Raises:
        ArgumentError: `label_smoothing` is outside 0..1.
        ShapeError: `logits` without its last dimension and `targets` differ in shape.

    Source: Szegedy et al. 2016 (arXiv 1512.00567), section 7.

    >>> loss = cross_entropy(torch.zeros(3, 4), torch.tensor([1, 2, 0]), ignore_index=0, label_smoothing=0.1)
    >>> int(loss.count), round(float(loss.total / loss.count), 4)  # log 4
    (2, 1.3863)
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise ArgumentError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    if logits.shape[:-1] != targets.shape:
        raise ShapeError(
            f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)}: one target a row of logits needed"
        )
    rows, flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    return LossSum(_SmoothedCrossEntropy.apply(rows, flat, ignore_index, label_smoothing), (flat != ignore_index).sum())


class _SmoothedCrossEntropy(torch.autograd.Function):
    """The sum and its gradient softmax(z) - (1 - e) * onehot - e / V, in blocks of rows."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        precise = torch.float64 if logits.dtype == torch.float64 else torch.float32
        live = targets != ignore_index
        picked = targets.where(live, 0)  # any valid index will do, as the row does not count
        lse = logits.new_empty(len(logits), dtype=precise)
        losses = torch.empty_like(lse)
        for rows in _blocks(len(logits)):
            z = logits[rows].to(precise)
            lse[rows] = torch.logsumexp(z, dim=-1)
            hit = z.gather(1, picked[rows, None])[:, 0]
            losses[rows] = lse[rows] - (1 - smoothing) * hit - smoothing * z.mean(dim=-1)
        ctx.save_for_backward(logits, picked, live, lse)
        ctx.smoothing = smoothing
        return losses.where(live, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None, None]:
        logits, picked, live, lse = ctx.saved_tensors
        weight = grad_total * live  # 0 for padding, and the gradient of the sum elsewhere
        grad = torch.empty_like(logits)
        for rows in _blocks(len(logits)):
            block = (logits[rows].to(lse.dtype) - lse[rows, None]).exp_()
            block -= ctx.smoothing / logits.shape[-1]
            block.scatter_add_(1, picked[rows, None], torch.full_like(lse[rows, None], ctx.smoothing - 1))
            grad[rows] = block.mul_(weight[rows, None])
        return grad, None, None, None


def _blocks(num_rows: int) -> list[slice]:
    return [slice(start, start + ROWS_AT_A_TIME) for start in range(0, num_rows, ROWS_AT_A_TIME)]
