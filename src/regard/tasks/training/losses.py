"""Losses as a sum and a count, for the mean over all tokens of a step; and other interfaces of the training loop."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

import regard.call  # noqa: F401 (so that the first exponential is made by one thread)
from regard.errors import ArgumentError, ShapeError


@dataclass(frozen=True, slots=True)
class LossSum:
    """A summed loss and the number of tokens in the sum; the mean is `total / count`."""

    total: Tensor
    count: Tensor


def cross_entropy(
    logits: Float[Tensor, "... V"], targets: Integer[Tensor, "..."], *, ignore_index: int, label_smoothing: float = 0.0
) -> LossSum:
    """Summed cross-entropy with label smoothing, in nats, over all targets except `ignore_index`.

    loss = sum over rows of lse(z) - (1 - e) * z[target] - e * mean(z)

    This is the cross-entropy against the target (1 - e) * onehot(target) + e / V. The sums are taken in float32
    (float64 for float64 logits).

    Args:
        logits: scores before the softmax, V of them for each target.
        targets: indices in 0..V-1, or `ignore_index` for no prediction.
        ignore_index: the padding index, which has no loss and no gradient.
        label_smoothing: the share e in 0..1 of the target's mass spread over all V.

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
    rows, flat = logits.reshape(-1, logits.shape[-1]), targets.long().reshape(-1)
    total = nn.functional.cross_entropy(
        rows.to(torch.promote_types(rows.dtype, torch.float32)), flat,
        ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum",
    )  # fmt: skip
    return LossSum(total, (flat != ignore_index).sum())


B = TypeVar("B")


class BatchSize(NamedTuple):
    """How large a batch is: the number of its tokens, and of its places including padding."""

    tokens: int
    places: int


class Batches(Protocol[B]):
    def epoch(self, epoch: int, start: int) -> Iterator[B]:
        """This rank's batches of one pass over the data, from index `start` on. All ranks have equally many."""

    def size(self, batch: B) -> BatchSize: ...


Loss = Callable[[nn.Module, Any], LossSum]
"""Computes the summed loss of a model on one batch."""

Validate = Callable[[], Mapping[str, float]]
"""Computes the metrics of the model on the validation data, by name."""
