"""The settings of a training run; the command line makes its flags from these fields."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from regard.errors import ArgumentError
from regard.training.distributed.choices import Precision, Strategy
from regard.training.fit_config import FitConfig
from regard.training.schedules import Schedule, constant, cosine, inverse_square_root


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """The settings that runs of all tasks have: where a run goes, how long and how fast it learns, on what device."""

    out: Path
    """The folder to make for the run."""

    fit: FitConfig = field(default_factory=FitConfig)
    """When training stops, validates and saves."""
    batch_tokens: int = 4_096
    """Tokens of a batch (of all ranks together), source and target, with the padding."""
    learning_rate: float = 1e-3
    """The highest learning rate."""
    warmup_steps: int = 1_000
    """Steps in which the learning rate rises to its highest."""
    schedule: Literal["inverse-square-root", "cosine", "constant"] = "inverse-square-root"
    """How the learning rate falls afterwards."""
    weight_decay: float = 0.01
    """Weight decay of AdamW; embeddings, gains and offsets do not decay."""

    warm_start: Path | None = None
    """A run folder: training begins with its best model, and uses its tokenizers."""
    pictures: int = 3
    """Validation sentences whose attention is drawn for TensorBoard at every validation; 0 draws none."""
    bad_batches: Literal["stop", "skip"] = "stop"
    """Whether a batch whose loss is NaN or infinite ends the run or is passed over; more than ten in a row end it."""
    seed: int = 0
    """Seed of all random numbers."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: Precision = "auto"
    """float32, bf16, or bf16 where the processor multiplies it faster."""
    strategy: Strategy = "auto"
    """What each rank that torchrun starts holds: all of the model (ddp, auto), or a share of it and of the
    optimizer (fsdp)."""
    gradient_checkpointing: bool = False
    """Whether layers keep only their inputs and compute the rest again in the backward pass: less memory, more time."""

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
            return cosine(config.learning_rate, config.warmup_steps, config.fit.steps)
        case "inverse-square-root":
            return inverse_square_root(config.learning_rate, config.warmup_steps)
