"""Requests to a translator: sentences, and how to translate them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from regard.tasks.generation.config import Beam
from regard.tasks.generation.filters import Vocabulary
from regard.tasks.translation.alignments import AlignmentOf
from regard.tasks.translation.reverse import Reverse
from regard.tasks.translation.tags import Tag
from regard.tasks.translation.terms import Terms


class Request(NamedTuple):
    """A sentence, and the beginning of its translation."""

    source: str
    prefix: str = ""
    tags: tuple[Tag, ...] = ()
    """Tags taken out of the source, to be put back into its translation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TranslationOptions:
    """How to translate; the fields are explained with `Translator.translate`."""

    beam: Beam = Beam()
    alignments: AlignmentOf | None = None
    copy_unknown: bool = False
    vocabulary: Vocabulary | None = None
    max_length: int | None = None
    confidence: bool = False
    keep_tags: bool = False
    terms: Terms | None = None
    reverse: Reverse | None = None
    labels: bool = True
    """Whether the answers have labels; a text alone needs none, and they take as long as a fast search."""

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
            "confidence": self.confidence,
            "keep-tags": self.keep_tags,
            "terms": None if self.terms is None else [list(term) for term in self.terms.terms],
            "reverse": None if self.reverse is None else [self.reverse.translator.fingerprint(), self.reverse.weight],
        }
