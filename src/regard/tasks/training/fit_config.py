"""The settings of the training loop."""

from dataclasses import dataclass
from typing import Literal

from regard.errors import ArgumentError
from regard.tensors.ranges import require_at_least

Precision = Literal["auto", "float32", "bf16"]
"""The precision of matrix products in training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitConfig:
    """When to stop, validate and save."""

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
