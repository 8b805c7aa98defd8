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


Event = Started | Stepped | Validated | Saved | Finished
Callback = Callable[[Event], None]
