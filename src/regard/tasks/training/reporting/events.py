"""The events of the training loop. They are plain values, so that a callback cannot change a result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Training begins, or resumes after `step` steps."""

    step: int
    total_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """Some updates were made. All means are over the steps since the last event of this kind."""

    step: int
    epoch: int
    loss: float
    """The mean training loss, in nats per token, including label smoothing if there is any."""
    learning_rate: float
    gradient_norm: float
    """The length of the gradient of the last step, before clipping."""
    tokens_per_second: float
    """Source and target tokens on all ranks, without padding."""
    padding_share: float
    """The share of padding among all places in the batches, 0..1."""
    seconds_left: float
    """The time until the last step, at the speed so far."""
    skipped_batches: int = 0
    """Batches skipped since the run began, because their loss or gradient was NaN or infinite."""
    device_memory_bytes: int = 0
    """The peak memory of tensors on the GPU so far; 0 without a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """An update was not made, because the loss or the gradient of its batches is NaN or infinite."""

    step: int
    """The step of the failed update; the next batches are used for this step."""
    epoch: int
    first: int
    """The index of its first batch in this pass over the data."""
    last: int
    """The index of its last batch."""
    reason: str
    in_a_row: int
    """How many updates in a row were not made, including this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validated:
    step: int
    metrics: Mapping[str, float]
    is_best: bool
    patience_used: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    step: int
    which: Literal["best", "last"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    step: int
    reason: Literal["steps", "patience"]
    skipped_batches: int = 0
    """Batches skipped in the whole run."""
    fall: float = 0.0
    """`fall_of` the training loss of the reports, in nats per token, if the last validation is the best one."""


Event = Started | Stepped | Skipped | Validated | Saved | Finished
Callback = Callable[[Event], None]


def fall_of(losses: Sequence[float]) -> float:
    """The mean of the last quarter of losses below that of the quarter before.

    >>> fall_of([8.0, 6.0, 5.0, 4.0]), fall_of([8.0])
    (1.0, 0.0)
    """
    size = max(len(losses) // 4, 1)
    last, before = losses[-size:], losses[-2 * size : -size]
    return (sum(before) - sum(last)) / size if len(before) == size else 0.0
