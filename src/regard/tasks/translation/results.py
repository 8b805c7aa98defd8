"""What a translator answers."""

from typing import NamedTuple

from torch import Tensor

from regard.maps.attention_map import AttentionMap
from regard.training.metrics import CorpusScore


class Candidate(NamedTuple):
    """One translation of a sentence."""

    text: str
    score: float
    """Log-probability divided by the number of tokens with beam search; the plain sum when greedy."""
    labels: list[str]
    """The tokens of the translation as one prints them, end mark included."""
    alignment: Tensor | None
    """(T, S) on the CPU, if it was asked for: what each label looked at among the source's; rows sum to 1."""


class Translation(NamedTuple):
    """A sentence and its translations, best first."""

    source: str
    source_labels: list[str]
    candidates: list[Candidate]
    problem: str | None = None
    """Why it could not be translated, and its translation is empty."""

    @property
    def text(self) -> str:
        """The best translation."""
        return self.candidates[0].text


class Attention(NamedTuple):
    """What a model attended to while it wrote a translation."""

    source_labels: list[str]
    target_labels: list[str]
    read_labels: list[str]
    """What the decoder read while it wrote `target_labels`: the begin mark, and all but the last of them."""
    maps: dict[str, AttentionMap | Tensor]
    """By name, each (H, T, S): "encoder.0", "decoder.0.self", "decoder.0.cross", ..."""
    alignment_names: list[str]
    """Which of them align the translation with the source."""

    @property
    def shown(self) -> str:
        """The last layer's alignment."""
        return self.alignment_names[-1]

    def labels(self, name: str) -> tuple[list[str], list[str]]:
        """The labels of a map's rows, which look, and of its columns, which are looked at."""
        if name.startswith("encoder"):
            return self.source_labels, self.source_labels
        return self.target_labels, self.source_labels if name in self.alignment_names else self.read_labels


class Evaluation(NamedTuple):
    """How well sentences were translated."""

    bleu: CorpusScore
    chrf: CorpusScore
    exact_match: float
    """Percentage of translations that equal their reference, 0..100."""
    loss: float
    """Mean cross-entropy of the references' tokens, in nats."""
    pairs: int
