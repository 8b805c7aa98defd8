"""What the training loop tells those who watch it: plain values, so that watching cannot change a result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Training begins, or goes on after `step` steps."""

    step: int
    total_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """Some updates were made; means are over the steps since the last of these events."""

    step: int
    epoch: int
    loss: float
    """Mean training loss, nats a token (with label smoothing, if it is trained with)."""
    learning_rate: float
    gradient_norm: float
    """Of the last step, before clipping."""
    tokens_per_second: float
    """Source and target tokens on all ranks, padding not counted."""
    padding_share: float
    """Padding among all places in the batches, 0..1."""
    seconds_left: float
    """Until the last step, at the speed so far."""
    skipped_batches: int = 0
    """Batches passed over since the run began, because their loss or gradient was not a number."""
    memory_bytes: int = 0
    """Resident memory of this process now."""
    device_memory_bytes: int = 0
    """The most that tensors took on the GPU so far; 0 without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """An update was not made, since the loss or the gradient of its batches is NaN or infinite."""

    step: int
    """The step that it would have been; the next batches are used for it."""
    epoch: int
    first: int
    """The index of its first batch in that pass over the data."""
    last: int
    """The index of its last batch."""
    reason: str
    in_a_row: int
    """How many updates were not made since the last that was, this one counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validated:
    """The validation data was scored."""

    step: int
    metrics: Mapping[str, float]
    is_best: bool
    patience_used: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint is on the disk."""

    step: int
    which: str
    """best, last, or the name of a model that is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Training is over."""

    step: int
    reason: Literal["steps", "patience"]
    skipped_batches: int = 0
    """Batches passed over in all of the run."""


Event = Started | Stepped | Skipped | Validated | Saved | Finished
Callback = Callable[[Event], None]
