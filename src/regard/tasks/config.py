"""What a training run is made from; the command line's flags are these fields."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from regard.errors import ArgumentError
from regard.training.distributed.devices import Precision, Strategy
from regard.training.fit_config import FitConfig
from regard.training.schedules import Schedule, constant, cosine, inverse_square_root


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """What every task's run has: where it goes, how long it trains, how fast it learns, what it runs on."""

    out: Path
    """The folder to make for the run."""

    steps: int = 10_000
    """Updates to make."""
    batch_tokens: int = 4_096
    """Places in a batch (of all ranks together), source and target, padding counted."""
    accumulate: int = 1
    """Batches whose gradients are summed for one update."""
    learning_rate: float = 1e-3
    """The highest learning rate."""
    warmup_steps: int = 1_000
    """Steps in which the learning rate rises to it."""
    schedule: Literal["inverse-square-root", "cosine", "constant"] = "inverse-square-root"
    """How the learning rate falls afterwards."""
    weight_decay: float = 0.01
    """Of AdamW; embeddings, gains and offsets do not decay."""
    clip_norm: float = 1.0
    """Gradients longer than this are shortened to it; 0 leaves them."""

    validate_every: int = 500
    """Steps between two validations."""
    save_every: int = 500
    """Steps between two checkpoints."""
    log_every: int = 20
    """Steps between two reports."""
    patience: int = 0
    """Validations without a better model before training ends; 0 never ends it early."""
    ema_decay: float = 0.0
    """Of the moving average of the weights, which is then validated and kept as the best; 0 keeps none."""
    keep: int = 0
    """How many models of the latest validations stay on the disk, for `regard choose`."""
    warm_start: Path | None = None
    """A run folder: training begins with its best model, and uses its tokenizers."""
    pictures: int = 3
    """Validation sentences whose attention is drawn for TensorBoard at every validation; 0 draws none."""
    bad_batches: Literal["stop", "skip"] = "stop"
    """Whether a batch whose loss is NaN or infinite ends the run or is passed over; more than ten in a row end it."""
    seed: int = 0
    """Everything random follows from it."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: Precision = "auto"
    """float32, bf16, or bf16 where the processor multiplies it faster."""
    strategy: Strategy = "auto"
    """What each rank that torchrun starts holds: all of the model (ddp, auto), or a share of it and of the
    optimizer (fsdp)."""
    gradient_checkpointing: bool = False
    """Whether layers keep only what they read and are computed again on the way back: less memory, more time."""

    def __post_init__(self) -> None:
        """Check the ranges that no other part checks."""
        if self.batch_tokens < 1:
            raise ArgumentError(f"batch_tokens must be at least 1, got {self.batch_tokens}")
        if self.seed < 0:
            raise ArgumentError(f"seed must be 0 or more, got {self.seed}")
        if self.pictures < 0:
            raise ArgumentError(f"pictures must be 0 or more, got {self.pictures}")
        if self.learning_rate <= 0:
            raise ArgumentError(f"learning_rate must be above 0, got {self.learning_rate}")


def make_schedule(config: TrainingConfig) -> Schedule:
    """The learning rate that the configuration describes.

    Raises:
        ArgumentError: the warm-up does not fit.
    """
    match config.schedule:
        case "constant":
            return constant(config.learning_rate)
        case "cosine":
            return cosine(config.learning_rate, config.warmup_steps, config.steps)
        case "inverse-square-root":
            return inverse_square_root(config.learning_rate, config.warmup_steps)


def make_fit_config(config: TrainingConfig) -> FitConfig:
    """When the training loop stops, validates and saves.

    Raises:
        ArgumentError: a number is out of its range.
    """
    return FitConfig(
        steps=config.steps,
        accumulate=config.accumulate,
        clip_norm=config.clip_norm,
        validate_every=config.validate_every,
        save_every=config.save_every,
        log_every=config.log_every,
        patience=config.patience,
        ema_decay=config.ema_decay,
        keep=config.keep,
        best_by=getattr(config, "best_by", "loss"),
    )
