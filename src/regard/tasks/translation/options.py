"""Requests to a translator: sentences, and how to translate them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from regard.tasks.generation.config import Beam
from regard.tasks.generation.filters import Vocabulary
from regard.tasks.translation.alignments import AlignmentOf
from regard.tasks.translation.reverse import Reverse
from regard.tasks.translation.terms import Terms


class Request(NamedTuple):
    """A sentence, and the beginning of its translation."""

    source: str
    prefix: str = ""
    is_wanted: Callable[[], bool] | None = None
    """Asked before each step of a search; once it is False, the translation ends where it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TranslationOptions:
    """How to translate, as an object that the stages of a `Translator` share."""

    beam: Beam = Beam()
    """How wide the search is, how many translations of each sentence come out, and which lengths it favours."""
    alignments: AlignmentOf | None = None
    """Which attention the candidates report as their alignment, as `AlignmentOf(layer=-1)`; None reports none. The
    fields below that need an alignment take this one, or the translator's `alignment`."""
    copy_unknown: bool = False
    """Whether each token that stands for a word outside the vocabulary is printed as the word of the source that it
    attends to most."""
    vocabulary: Vocabulary | None = None
    """The tokens that translations may contain; see `Translator.vocabulary`."""
    max_length: int | None = None
    """The most tokens of a sentence, its end mark counted; None means as many as the longest had in training. The model
    saw no longer ones, and a search takes a time that grows with their square."""
    max_target_length: int | None = None
    """The most tokens of a translation, its end mark counted: a longer one is cut off. None means 2 n + 50 for a
    sentence of n tokens, rounded up."""
    confidence: bool = False
    """Whether candidates say how sure the model was of each token, and which words were left untranslated."""
    keep_tags: bool = False
    """Whether tags (`<b>`) and placeholders (`{name}`, `%s`) of a source are taken out of it, and put back into its
    translations where the alignment says that they belong."""
    terms: Terms | None = None
    """Terms and their translations: where a source has such a term, its translation has the given one, once for each
    time and where the alignment says that it is translated."""
    reverse: Reverse | None = None
    """A translator of the other direction, which has a say in which of the beam's hypotheses is best."""
    labels: bool = True
    """Whether the answers have labels; a text alone needs none, and they take as long as a fast search."""

    @property
    def has_labels(self) -> bool:
        """Whether tokens are labelled: asked for, or needed for alignments or confidence."""
        return self.labels or self.alignments is not None or self.confidence

    def settings(self) -> dict[str, Any]:
        """The options that decide the answers, as values for JSON."""
        chosen = None if self.vocabulary is None else self.vocabulary.tokens.nonzero()[:, 0].tolist()
        alignments = None if self.alignments is None else str(self.alignments)
        return {
            "beam": self.beam.size,
            "nbest": self.beam.num_best,
            "length-penalty": self.beam.length_penalty,
            "length-reward": self.beam.length_reward,
            "alignments": alignments,
            "copy-unknown": self.copy_unknown,
            "vocabulary": chosen,
            "max-length": self.max_length,
            "max-target-length": self.max_target_length,
            "confidence": self.confidence,
            "keep-tags": self.keep_tags,
            "terms": None if self.terms is None else [list(term) for term in self.terms.terms],
            "reverse": None if self.reverse is None else [self.reverse.translator.fingerprint(), self.reverse.weight],
        }
