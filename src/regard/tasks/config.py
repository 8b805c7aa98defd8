"""What a training run is made from; the command line's flags are these fields."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from regard.errors import ArgumentError
from regard.models.rnn import RNNConfig, RNNSeq2Seq
from regard.models.transformer import Transformer, TransformerConfig
from regard.training.devices import Precision
from regard.training.loop import FitConfig
from regard.training.schedules import Schedule, constant, cosine, inverse_square_root

Model = Transformer | RNNSeq2Seq


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TranslationConfig(TrainingConfig):
    """Train a translator on pairs of sentences."""

    data: tuple[Path, ...]
    """The pairs: one file (two columns with a tab between them, or JSON lines) or two aligned files; gzip too."""
    valid: tuple[Path, ...] = ()
    """Pairs to validate on, in the same forms; without them a seeded share of the data is split off."""
    data_format: Literal["tsv", "tsv-extra", "jsonl", "aligned"] | None = None
    """The form of these files, if their names do not tell; tsv-extra has further columns, to be left out."""
    bad_lines: Literal["stop", "skip"] = "stop"
    """Whether a line that cannot be read ends the run or is left out."""

    model: Literal["transformer", "rnn"] = "transformer"
    """The Transformer, or the recurrent model with attention."""
    transformer: TransformerConfig = field(default_factory=TransformerConfig)
    """Used with --model transformer."""
    rnn: RNNConfig = field(default_factory=RNNConfig)
    """Used with --model rnn."""

    tokenizer: Literal["bpe", "words", "characters"] = "bpe"
    """How text is cut: byte-level BPE learnt from the data, words, or characters."""
    vocab_size: int = 8_000
    """Most tokens in a vocabulary."""
    shared_vocabulary: bool = False
    """One vocabulary for source and target instead of one each."""
    max_length: int = 256
    """Longest source or target to train on, in tokens; longer pairs are left out and counted."""

    label_smoothing: float = 0.1
    """Share of a target's probability that is spread over the vocabulary, 0 to 1."""
    best_by: Literal["loss", "bleu"] = "loss"
    """What makes a model the best at a validation; for bleu the validation sources are translated each time."""
    validation_beam: int = 1
    """Hypotheses of that search; 1 is greedy."""

    def __post_init__(self) -> None:
        """Check the ranges that no other part checks."""
        TrainingConfig.__post_init__(self)  # a class with slots is made anew, which super() does not follow
        for name in ("vocab_size", "max_length", "validation_beam"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ArgumentError(f"label_smoothing must be between 0 and 1, got {self.label_smoothing}")
        if self.model == "transformer" and self.transformer.shared_embeddings and not self.shared_vocabulary:
            raise ArgumentError("shared embeddings need one vocabulary: add --shared-vocabulary")


def make_model(config: TranslationConfig, *, source_vocab_size: int, target_vocab_size: int) -> Model:
    """The model that the configuration describes, with fresh weights."""
    if config.model == "rnn":
        return RNNSeq2Seq(config.rnn, source_vocab_size=source_vocab_size, target_vocab_size=target_vocab_size)
    return Transformer(config.transformer, source_vocab_size=source_vocab_size, target_vocab_size=target_vocab_size)


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
