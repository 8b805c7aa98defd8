"""Two answers to a batch whose loss or gradient is NaN or infinite: end the run, or skip the batch and count it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from regard.errors import NonFiniteError
from regard.tasks.training.reporting import Skipped, describe_bad
from regard.tensors.ranges import require_at_least

BadBatches = Callable[[Skipped], None]
"""Called with each impossible update, before anything changes. It raises an error to end the run."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run at the first bad batch.

    >>> Stop()(Skipped(step=6, epoch=1, first=2, last=2, reason="the loss is nan", in_a_row=1))
    Traceback (most recent call last):
    regard.errors.NonFiniteError: the loss is nan at step 6 (epoch 1, batch 2); lower the learning rate, look at that
    batch, or have such batches passed over (--bad-batches skip); the last checkpoint is untouched
    """

    def __call__(self, bad: Skipped) -> None:
        raise NonFiniteError(
            f"{describe_bad(bad)}; lower the learning rate, look at that batch, or have such batches passed over "
            "(--bad-batches skip); the last checkpoint is untouched"
        )


@dataclass(frozen=True, slots=True)
class Skip:
    """Skip bad batches, until too many come one after the other: then the batches are not the cause.

    >>> Skip(most_in_a_row=2)(Skipped(step=6, epoch=1, first=2, last=3, reason="the loss is nan", in_a_row=3))
    Traceback (most recent call last):
    regard.errors.NonFiniteError: the loss is nan at step 6 (epoch 1, batches 2 to 3), and was not a number for the 2
    updates before; lower the learning rate; the last checkpoint is untouched
    """

    most_in_a_row: int = 10
    """The most consecutive skipped updates; one more ends the run."""

    def __post_init__(self) -> None:
        require_at_least(1, most_in_a_row=self.most_in_a_row)

    def __call__(self, bad: Skipped) -> None:
        if bad.in_a_row > self.most_in_a_row:
            raise NonFiniteError(
                f"{describe_bad(bad)}, and was not a number for the {self.most_in_a_row} updates before; "
                "lower the learning rate; the last checkpoint is untouched"
            )


def bad_batches(name: Literal["stop", "skip"]) -> BadBatches:
    """The named policy for bad batches.

    >>> bad_batches("skip")
    Skip(most_in_a_row=10)
    """
    return Skip() if name == "skip" else Stop()


def what_is_wrong(loss: float, norm: float) -> str | None:
    """The non-finite one of the two in words; None if both are finite.

    >>> what_is_wrong(2.5, float("inf")), what_is_wrong(2.5, 1.0)
    ("the gradient's length is inf", None)
    """
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    return None if math.isfinite(norm) else f"the gradient's length is {norm}"
