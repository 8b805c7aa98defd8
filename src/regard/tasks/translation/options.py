"""What a translator is asked for: sentences, and how to translate them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from regard.errors import ArgumentError
from regard.generation.filters import Constraint, ForcedPrefix, Vocabulary
from regard.tasks.translation.alignments import AlignmentOf


class Request(NamedTuple):
    """A sentence, and what its translation must begin with."""

    source: str
    prefix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How to translate; the fields are those of `Translator.translate`."""

    beam_size: int = 5
    num_best: int = 1
    length_penalty: float = 1.0
    alignments: AlignmentOf | None = None
    copy_unknown: bool = False
    vocabulary: Vocabulary | None = None

    def __post_init__(self) -> None:
        """Check the numbers once."""
        if not 1 <= self.num_best <= self.beam_size:
            raise ArgumentError(f"num_best must be in 1..beam_size, got {self.num_best} and {self.beam_size}")
        if not 0 <= self.length_penalty < float("inf"):
            raise ArgumentError(f"length_penalty must be at least 0 and finite, got {self.length_penalty}")

    def settings(self) -> dict[str, Any]:
        """What decides the answers, as JSON can hold it."""
        chosen = None if self.vocabulary is None else self.vocabulary.tokens.nonzero()[:, 0].tolist()
        alignments = None if self.alignments is None else str(self.alignments)
        return {
            "beam": self.beam_size,
            "nbest": self.num_best,
            "length-penalty": self.length_penalty,
            "alignments": alignments,
            "copy-unknown": self.copy_unknown,
            "vocabulary": chosen,
        }

    def constraints(self, prefixes: Sequence[Sequence[int]]) -> list[Constraint]:
        """What may be chosen in the answers to sources with these prefixes."""
        forced: list[Constraint] = [ForcedPrefix(prefixes)] if any(prefixes) else []
        return forced if self.vocabulary is None else [*forced, self.vocabulary]
