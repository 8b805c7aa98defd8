"""The settings of the training loop, and learning rates as pure functions of the step: a resumed run gets the same.

Steps count from 1: the first update of the parameters is step 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from regard.errors import ArgumentError
from regard.tensors.ranges import require_at_least

Precision = Literal["auto", "float32", "bf16"]
"""The precision of matrix products in training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitConfig:
    """When training validates, saves and stops."""

    steps: int = 10_000
    """Updates to make in all."""
    epochs: int = 0
    """Passes over the data to make; above 0 they decide, and not the steps."""
    accumulate: int = 1
    """The number of batches whose gradients are summed for one update."""
    clip_norm: float = 1.0
    """A longer gradient is shortened to this length; 0 never shortens it."""
    validate_every: int = 500
    """Steps between two validations."""
    save_every: int = 500
    """Steps between two checkpoints."""
    log_every: int = 20
    """Steps between two reports."""
    patience: int = 0
    """Training ends after so many validations without a better model; 0 never ends it early."""
    ema_decay: float = 0.0
    """The decay of the moving average of the weights, which is then validated and kept as the best; 0: no average."""

    def __post_init__(self) -> None:
        counts = {"steps": self.steps, "accumulate": self.accumulate, "log_every": self.log_every}
        require_at_least(1, **counts, validate_every=self.validate_every, save_every=self.save_every)
        require_at_least(0, epochs=self.epochs, clip_norm=self.clip_norm, patience=self.patience)
        if not 0.0 <= self.ema_decay < 1.0:
            raise ArgumentError(f"ema_decay must be at least 0 and below 1, got {self.ema_decay}")


Schedule = Callable[[int], float]


def constant(peak: float) -> Schedule:
    return lambda step: peak


def inverse_square_root(peak: float, warmup_steps: int) -> Schedule:
    """Rise in a straight line to `peak`, then fall with the square root of the step.

    rate(n) = peak * min(n / warmup, sqrt(warmup / n))

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 5.3; there peak = (dim * warmup) ** -0.5.
    """
    require_at_least(1, warmup_steps=warmup_steps)
    return lambda step: peak * min(step / warmup_steps, math.sqrt(warmup_steps / step))


def cosine(peak: float, warmup_steps: int, total_steps: int) -> Schedule:
    """Rise in a straight line to `peak`, then fall along half a cosine to 0 at `total_steps`, and stay there.

    rate(n) = peak * (1 + cos(pi * (n - warmup) / (total - warmup))) / 2   for warmup <= n <= total

    If training ends before its warm-up, the rate only rises.

    Source: Loshchilov and Hutter 2017 (arXiv 1608.03983), equation 5, without restarts.
    """
    require_at_least(0, warmup_steps=warmup_steps)

    def rate(step: int) -> float:
        if step < warmup_steps:
            return peak * step / warmup_steps
        done = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
        return peak * (1 + math.cos(math.pi * done)) / 2

    return rate
