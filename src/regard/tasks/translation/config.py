"""The settings of a translator."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from regard.errors import ArgumentError
from regard.models.config import RNNConfig, TransformerConfig
from regard.tasks.config import TrainingConfig
from regard.tasks.generation.config import Beam
from regard.tasks.text.lines import BadLines, PairFormat
from regard.tasks.training.metrics import BleuTokenize
from regard.tensors.ranges import require_at_least, require_share


@dataclass(frozen=True, kw_only=True, slots=True)
class TranslationConfig(TrainingConfig):
    """Train a translator on pairs of sentences."""

    data: tuple[Path, ...]
    """The pairs: tables of two columns (tabs, or CSV), JSON lines, TMX, or two aligned files; may be packed."""
    valid: tuple[Path, ...] = ()
    """Pairs to validate on, in the same forms; unless given, a share of the data, the same for every seed."""
    data_format: PairFormat | None = None
    """The form of these files, if their names do not tell; tsv-extra has further columns, which are ignored."""
    bad_lines: BadLines = "stop"
    """Whether a line that cannot be read ends the run or is left out."""

    model: Literal["transformer", "rnn"] = "transformer"
    """The Transformer, or the recurrent model with attention."""
    transformer: TransformerConfig = field(default_factory=lambda: TransformerConfig(embedding_gain=3.0))
    """Used with --model transformer. A vocabulary of thousands of pieces learns faster with this gain."""
    rnn: RNNConfig = field(default_factory=RNNConfig)
    """Used with --model rnn."""

    tokenizer: Literal["bpe", "words", "characters"] = "bpe"
    """How text is cut: byte-level BPE learnt from the data, words, or characters."""
    vocab_size: int = 8_000
    """The most tokens of a vocabulary."""
    lowercase: bool = False
    """Read source and target in lower case, and write translations in lower case."""
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
    bleu_tokenize: BleuTokenize = "auto"
    """sacrebleu's tokenizer for bleu; auto is 13a, or for a script without spaces one that fits it."""

    def __post_init__(self) -> None:
        # super() fails here: `dataclass` replaces a class with slots by a new one, and super() knows the old one.
        TrainingConfig.__post_init__(self)
        if self.batch_tokens < 4:
            raise ArgumentError(
                f"batch_tokens must be at least 4, got {self.batch_tokens}: the shortest pair has a token and an end "
                "mark on either side"
            )
        counts = {"vocab_size": self.vocab_size, "validation_beam": self.validation_beam}
        require_at_least(1, **counts, max_length=self.max_length)
        Beam(self.validation_beam)  # It refuses sizes that no machine has room for, before training begins.
        require_share(label_smoothing=self.label_smoothing)
        if self.model == "transformer" and self.transformer.shared_embeddings and not self.shared_vocabulary:
            raise ArgumentError("shared embeddings need one vocabulary: add --shared-vocabulary")
        learned = self.model == "transformer" and self.transformer.positions == "learned"
        if learned and self.max_length > self.transformer.max_length:
            raise ArgumentError(
                f"the model has {self.transformer.max_length} positions and trains on sentences of up to "
                f"{self.max_length} tokens: lower --max-length or raise --transformer.max-length"
            )

    @property
    def sizes(self) -> TransformerConfig | RNNConfig:
        return self.rnn if self.model == "rnn" else self.transformer
