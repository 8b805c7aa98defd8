"""The settings of a translator."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from regard.errors import ArgumentError
from regard.models.config import RNNConfig, TransformerConfig
from regard.tasks.config import TrainingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TranslationConfig(TrainingConfig):
    """Train a translator on pairs of sentences."""

    data: tuple[Path, ...]
    """The pairs: files with two columns and a tab between them, or JSON lines, or two aligned files; may be gzipped."""
    valid: tuple[Path, ...] = ()
    """Pairs to validate on, in the same forms; unless given, a share of the data, chosen by the seed."""
    data_format: Literal["tsv", "tsv-extra", "jsonl", "aligned"] | None = None
    """The form of these files, if their names do not tell; tsv-extra has further columns, which are ignored."""
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
    """The most tokens of a vocabulary."""
    shared_vocabulary: bool = False
    """One vocabulary for source and target instead of one each."""
    max_length: int = 256
    """The most tokens of a source or target in training; pairs with longer ones are left out and counted."""

    label_smoothing: float = 0.1
    """Share of a target's probability that is spread over the vocabulary, 0 to 1."""
    best_by: Literal["loss", "bleu"] = "loss"
    """The metric that decides which model is best; with bleu, each validation translates the validation sources."""
    validation_beam: int = 1
    """Hypotheses of the search for bleu; 1 is greedy."""

    def __post_init__(self) -> None:
        """Check the ranges that no other part checks."""
        # super() fails here: `dataclass` replaces a class with slots by a new one, and super() knows the old one.
        TrainingConfig.__post_init__(self)
        for name in ("vocab_size", "max_length", "validation_beam"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ArgumentError(f"label_smoothing must be between 0 and 1, got {self.label_smoothing}")
        if self.model == "transformer" and self.transformer.shared_embeddings and not self.shared_vocabulary:
            raise ArgumentError("shared embeddings need one vocabulary: add --shared-vocabulary")
