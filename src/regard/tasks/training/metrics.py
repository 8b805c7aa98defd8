"""Measures of the quality of translations. Every score is between 0 and 100, and higher is better."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from regard.errors import ArgumentError, needs


class CorpusScore(NamedTuple):
    """A score in 0..100 and the signature of its exact computation."""

    value: float
    signature: str


def exact_match(hypotheses: Sequence[str], *references: Sequence[str | None], lowercase: bool = False) -> float:
    """The percentage (0..100) of hypotheses that equal one of their references, character for character.

    Args:
        hypotheses: one translation a sentence.
        references: one or more sets, each in the order of the hypotheses; None where a sentence has fewer.
        lowercase: whether case does not count.

    >>> exact_match(["a", "b", "c", "d"], ["a", "b", "c", "x"])
    75.0
    """
    _check_counts(hypotheses, *references)
    fold = str.lower if lowercase else str
    sides = [[text if text is None else fold(text) for text in side] for side in (hypotheses, *references)]
    equal = sum(ours in theirs for ours, *theirs in zip(*sides, strict=True))
    return 100.0 * equal / len(hypotheses)


def chrf(hypotheses: Sequence[str], *references: Sequence[str | None], lowercase: bool = False) -> CorpusScore:
    """Corpus chrF (0..100) of sacrebleu: the F2 score of character n-grams up to 6.

    Source: Popović 2015 (W15-3049).

    >>> chrf(["2026-11-21"], ["2026-11-21"]).value
    100.0
    """
    return corpus_score(sacrebleu_metric("CHRF", lowercase=lowercase), hypotheses, references)


def sacrebleu_metric(name: str, **settings: Any) -> Any:
    """A metric of sacrebleu; raises MissingExtraError if it is not installed."""
    with needs("sacrebleu", extra="train"):
        from sacrebleu import metrics
    return getattr(metrics, name)(**settings)


def corpus_score(metric: Any, hypotheses: Sequence[str], references: Sequence[Sequence[str | None]]) -> CorpusScore:
    """The score of a metric of sacrebleu, and its signature; raises ArgumentError for other numbers of references."""
    _check_counts(hypotheses, *references)
    score = metric.corpus_score(list(hypotheses), references).score
    # The score is cut at 100 because sacrebleu's geometric mean can give 100.00000000000004.
    return CorpusScore(min(score, 100.0), str(metric.get_signature()))


def _check_counts(hypotheses: Sequence[str], *references: Sequence[str | None]) -> None:
    counts = [len(one) for one in references]
    if not references or not hypotheses or any(count != len(hypotheses) for count in counts):
        raise ArgumentError(f"one reference a hypothesis needed, got {len(hypotheses)} hypotheses and {counts}")
