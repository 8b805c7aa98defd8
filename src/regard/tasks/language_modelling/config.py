"""The settings of language models, which learn from running text."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from regard.errors import ArgumentError
from regard.models.config import DecoderOnlyConfig
from regard.tasks.config import TrainingConfig
from regard.tasks.text.lines import BadLines, RunningTextFormat
from regard.tasks.training.fit_config import FitConfig
from regard.tensors.ranges import require_at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModelConfig(TrainingConfig):
    """Train a language model on running text."""

    longest_warmup: ClassVar[int] = 100

    data: tuple[Path, ...]
    """The text: one file, or several that are read one after the other; may be packed (.gz, .bz2, .xz, .zst)."""
    valid: tuple[Path, ...] = ()
    """Text to validate on; unless given, the tail of the data, which training then never sees."""
    valid_share: float = 0.1
    """Share of the data that this tail is, 0 to 1; at most ten million bytes are taken."""
    documents: Literal["file", "paragraphs", "lines"] = "file"
    """Where a document ends: never (file), at a blank line, or at the end of each line."""
    data_format: RunningTextFormat | None = None
    """The form of these files, if their names do not tell: lines of text, or JSON lines with a `text` each."""
    bad_lines: BadLines = "stop"
    """Whether a line that cannot be read ends the run or is left out."""
    model: DecoderOnlyConfig = field(default_factory=DecoderOnlyConfig)
    """The decoder-only Transformer."""
    tokenizer: Literal["bpe", "words", "characters"] = "bpe"
    """How text is cut: byte-level BPE learnt from the data, words, or characters."""
    vocab_size: int = 8_000
    """The most tokens of the vocabulary."""
    block_length: int = 256
    """Tokens that the model reads at once."""
    batch_tokens: int = 4_096
    """Tokens of a batch (of all ranks together), rounded down to whole blocks; at least one block."""
    fit: FitConfig = field(default_factory=lambda: FitConfig(steps=5_000))
    """When training stops, validates and saves."""
    warmup_steps: int | None = None
    """Steps in which the learning rate rises to its highest: a tenth of the run, and at most 100, unless given."""
    schedule: Literal["inverse-square-root", "cosine", "constant"] = "cosine"
    """How the learning rate falls afterwards."""
    weight_decay: float = 0.1
    """Weight decay; gains and offsets do not decay."""

    def __post_init__(self) -> None:
        # super() fails here: `dataclass` replaces a class with slots by a new one, and super() knows the old one.
        TrainingConfig.__post_init__(self)
        require_at_least(1, vocab_size=self.vocab_size)
        require_at_least(2, block_length=self.block_length)
        if not 0.0 < self.valid_share < 1.0:
            raise ArgumentError(f"valid_share must be above 0 and below 1, got {self.valid_share}")
        if self.model.positions == "learned" and self.block_length > self.model.max_length:
            raise ArgumentError(
                f"the model has {self.model.max_length} positions and trains on blocks of {self.block_length} tokens: "
                "lower --block-length or raise --model.max-length"
            )

    @property
    def sizes(self) -> DecoderOnlyConfig:
        return self.model
