"""The names of the tasks and the settings of a training run, of which the command line makes its flags."""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from regard.errors import ArgumentError
from regard.models.config import ModelConfig
from regard.tasks.training.fit_config import FitConfig, Precision, Schedule, constant, cosine, inverse_square_root
from regard.tensors.ranges import require_above, require_at_least

TRANSLATION = "translation"
LANGUAGE_MODEL = "language-model"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig(ABC):
    """The settings that runs of all tasks have: where a run goes, how long and how fast it learns, on which device."""

    longest_warmup: ClassVar[int] = 1_000

    out: Path
    """The folder to make for the run."""

    fit: FitConfig = field(default_factory=FitConfig)
    """When training stops, validates and saves."""
    batch_tokens: int = 4_096
    """Tokens of a batch (of all ranks together), source and target, with the padding."""
    learning_rate: float = 1e-3
    """The highest learning rate."""
    warmup_steps: int | None = None
    """Steps in which the learning rate rises to its highest: a tenth of the run, and at most 1,000, unless given."""
    schedule: Literal["inverse-square-root", "cosine", "constant"] = "inverse-square-root"
    """How the learning rate falls afterwards."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW, or Muon for the matrices of hidden layers with AdamW for the rest."""
    muon_rate: float = 1.0
    """The learning rate of Muon, as a multiple of --learning-rate."""
    weight_decay: float = 0.01
    """Weight decay; embeddings, gains and offsets do not decay."""

    warm_start: Path | None = None
    """A run folder: training begins with its best model, and uses its tokenizers."""
    tokenizers_of: Path | None = None
    """A run folder whose tokenizers are used instead of new ones, so that the losses of models of other sizes or
    of other data can be compared."""
    pictures: int = 3
    """Validation sentences whose attention is drawn for TensorBoard at every validation; 0 draws none."""
    bad_batches: Literal["stop", "skip"] = "stop"
    """Whether a batch whose loss is NaN or infinite ends the run or is passed over; more than ten in a row end it."""
    seed: int = 0
    """Seed of all random numbers."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    threads: int | None = None
    """Threads on the processor, one for each core unless given; beside other work on these cores fewer are faster."""
    precision: Precision = "auto"
    """float32, bf16, or bf16 where the processor multiplies it faster."""
    gradient_checkpointing: bool = False
    """Whether layers keep only their inputs and compute the rest again in the backward pass: less memory, more time."""

    def __post_init__(self) -> None:
        require_above(0, learning_rate=self.learning_rate, muon_rate=self.muon_rate)
        if self.optimizer != "muon" and self.muon_rate != 1.0:
            raise ArgumentError(f"muon_rate is for --optimizer muon, and this is {self.optimizer}: leave it out")
        if self.tokenizers_of is not None and self.warm_start is not None:
            raise ArgumentError("warm_start uses the tokenizers of its own run: leave out tokenizers_of")
        require_at_least(1, batch_tokens=self.batch_tokens, threads=1 if self.threads is None else self.threads)
        require_at_least(0, seed=self.seed, pictures=self.pictures, weight_decay=self.weight_decay)
        require_at_least(1 if self.schedule == "inverse-square-root" else 0, warmup_steps=self.warmup)
        if not re.fullmatch("auto|cpu|mps|cuda(:[0-9]+)?", self.device):
            raise ArgumentError(f"device must be auto, cpu, cuda, cuda:N or mps, got {self.device!r}")

    @property
    def warmup(self) -> int:
        """The steps of the warm-up, for as many steps as the run has."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return min(self.longest_warmup, max(self.fit.steps // 10, 1))

    @property
    def tokenizers_from(self) -> Path | None:
        """The folder of the run whose tokenizers are used; None if new ones are learnt."""
        return self.warm_start if self.tokenizers_of is None else self.tokenizers_of

    @property
    @abstractmethod
    def sizes(self) -> ModelConfig:
        """The settings of the model that is trained. Every task says which of its settings they are."""


def make_schedule(config: TrainingConfig) -> Schedule:
    match config.schedule:
        case "constant":
            return constant(config.learning_rate)
        case "cosine":
            return cosine(config.learning_rate, config.warmup, config.fit.steps)
        case "inverse-square-root":
            return inverse_square_root(config.learning_rate, config.warmup)
