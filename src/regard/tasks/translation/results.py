"""The answers of a translator: translations, their attention, and scores."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from regard.lazy import displayed
from regard.tasks.pictures.token_maps import Alternative
from regard.tasks.training.metrics import CorpusScore


@displayed
class Candidate(NamedTuple):
    text: str
    score: float
    """Log-probability: the plain sum with greedy search; with beam search as `Beam` says, by default
    divided by the number of tokens."""
    labels: list[str]
    """The tokens of the translation as they are printed, end mark included; none if they were not asked for."""
    alignment: Tensor | None
    """(T, S) on the CPU, if it was asked for: how much each label attended to each label of the source; rows sum
    to 1."""
    finished: bool = True
    """Whether the model ended it; otherwise it was cut off at the most steps."""
    limited: bool = False
    """Whether it ended, and one that was cut off at the most steps scored higher."""


@displayed
class Translation(NamedTuple):
    """A sentence and its translations: those that the model ended, best first, then those cut off, too."""

    source: str
    source_labels: list[str]
    candidates: list[Candidate]
    problem: str | None = None
    """Why the sentence could not be translated (its translation is then empty)."""
    unknown: Sequence[str] = ()
    """The stretches of the sentence that the vocabulary lacks: the model reads each as the same unknown token."""

    @property
    def text(self) -> str:
        """The best translation."""
        return self.candidates[0].text


@displayed
class Attention(NamedTuple):
    source_labels: list[str]
    target_labels: list[str]
    read_labels: list[str]
    """The labels of the decoder's input for `target_labels`: the begin mark, then all but the last."""
    maps: dict[str, Any]
    """The maps by name, each (H, T, S): "encoder.0", "decoder.0.self", "decoder.0.cross", ..."""
    alignment_names: list[str]
    """The names of the maps that align the translation with the source."""
    choices: list[list[Alternative]] | None = None
    """For each target label the most probable tokens in its place, apart from its own; None: not asked for."""

    @property
    def shown(self) -> str:
        return self.alignment_names[-1]

    def labels(self, name: str) -> tuple[list[str], list[str]]:
        if name.startswith("encoder"):
            return self.source_labels, self.source_labels
        return self.target_labels, self.source_labels if name in self.alignment_names else self.read_labels

    def alternatives(self, name: str) -> list[list[Alternative]] | None:
        return None if name.startswith("encoder") else self.choices


@displayed
class Evaluation(NamedTuple):
    bleu: CorpusScore
    chrf: CorpusScore
    exact_match: float
    """Percentage of translations that equal their reference, 0..100."""
    loss: float
    """Mean cross-entropy of the references' tokens, in nats."""
    pairs: int
    cut_off: int = 0
    """Translations that were cut off before their end, or are the best because better ones were."""
    unknown: float = 0.0
    """The share (0..1) of the references' tokens that are unknown: the loss counts each as one word that may be hit."""
