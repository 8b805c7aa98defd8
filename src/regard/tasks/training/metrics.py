"""Measures of the quality of translations. Every score is between 0 and 100, and higher is better.

BLEU is sacrebleu's, with a tokenizer that fits the language of the references.
"""

import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from regard.errors import ArgumentError, MissingExtraError, needs


class CorpusScore(NamedTuple):
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
    with needs("sacrebleu", extra="train"):
        from sacrebleu import metrics
    return getattr(metrics, name)(**settings)


def corpus_score(metric: Any, hypotheses: Sequence[str], references: Sequence[Sequence[str | None]]) -> CorpusScore:
    _check_counts(hypotheses, *references)
    score = metric.corpus_score(list(hypotheses), references).score
    # The score is cut at 100 because sacrebleu's geometric mean can give 100.00000000000004.
    return CorpusScore(min(score, 100.0), str(metric.get_signature()))


def _check_counts(hypotheses: Sequence[str], *references: Sequence[str | None]) -> None:
    counts = [len(one) for one in references]
    if not references or not hypotheses or any(count != len(hypotheses) for count in counts):
        raise ArgumentError(f"one reference a hypothesis needed, got {len(hypotheses)} hypotheses and {counts}")


BleuTokenize = Literal["auto", "13a", "intl", "zh", "ja-mecab", "ko-mecab", "flores200", "char", "none"]
"""sacrebleu's tokenizers; auto takes the one that fits the references."""
LEAST_BLEU = 1.0
"""Below this, BLEU does not tell models apart."""
KANA = ("HIRAGANA", "KATAKANA")
HAN = ("CJK",)
OTHERS = ("THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")
"""The first words of the names of letters in scripts that put no spaces between words."""


def bleu(
    hypotheses: Sequence[str],
    *references: Sequence[str | None],
    lowercase: bool = False,
    tokenize: BleuTokenize = "auto",
) -> CorpusScore:
    """Corpus BLEU (0..100) of sacrebleu, on plain text.

    Args:
        hypotheses: one translation a sentence, as plain text.
        references: one or more sets of reference translations, each in the order of the hypotheses; None where a
            sentence has fewer.
        lowercase: whether case does not count; the signature says so.
        tokenize: sacrebleu's tokenizer; the signature says which. auto is 13a, but `fitting_tokenizer` for
            references without spaces.

    Raises:
        ArgumentError: hypotheses and references differ in number, or there are none; or the tokenizer cannot be had.
        MissingExtraError: sacrebleu is not installed.

    Source: Papineni et al. 2002; Post 2018 (arXiv 1804.08771).

    >>> bleu(["the cat sat on the mat"], ["the cat sat on the mat"]).value
    100.0
    >>> "tok:zh" in bleu(["我今天在家喝茶"], ["我今天在家喝茶"]).signature
    True
    """
    every = (text for one in references for text in one if text is not None)
    chosen = fitting_tokenizer(every) if tokenize == "auto" else tokenize
    return corpus_score(_metric(chosen, lowercase), hypotheses, references)


class BleuCounts:
    """The counts of corpus BLEU, which can be summed over sentences, batches and ranks.

    They are ten: matching n-grams of 1 to 4 words, all n-grams of 1 to 4 words, words of hypotheses and of references.
    All references decide about the tokenizer; the other arguments and the errors are those of `bleu`.

    >>> text = ["the cat sat on the mat"]
    >>> counter = BleuCounts(text)
    >>> counter.score(counter.of(text, text))
    100.0
    """

    def __init__(self, references: Iterable[str], *, lowercase: bool = False, tokenize: BleuTokenize = "auto") -> None:
        self._metric = _metric(fitting_tokenizer(references) if tokenize == "auto" else tokenize, lowercase)

    @property
    def signature(self) -> str:
        self._metric.corpus_score([""], [[""]])  # it counts the references in this call
        return str(self._metric.get_signature())

    def of(self, hypotheses: Sequence[str], references: Sequence[str]) -> list[float]:
        if not hypotheses:
            return [0.0] * 10
        found = self._metric.corpus_score(list(hypotheses), [list(references)])
        return [*found.counts, *found.totals, found.sys_len, found.ref_len]

    def score(self, counts: Sequence[float]) -> float:
        """BLEU in 0..100, as `bleu` would give it for all counted sentences."""
        numbers, metric = [int(value) for value in counts], self._metric
        score = metric.compute_bleu(
            correct=numbers[:4], total=numbers[4:8], sys_len=numbers[8], ref_len=numbers[9],
            smooth_method=metric.smooth_method, smooth_value=metric.smooth_value,
        ).score  # fmt: skip
        return min(float(score), 100.0)


def fitting_tokenizer(references: Iterable[str]) -> BleuTokenize:
    """sacrebleu's tokenizer for the script of most letters of the references.

    13a cuts where a text has spaces. Of scripts without them, Chinese has zh; Japanese ja-mecab where MeCab and its
    dictionary are installed; all others flores200 where sacrebleu's model of it is on this machine; the rest char.
    """
    letters = Counter(character for text in references for character in text if character.isalpha())
    by_script: Counter[str] = Counter()
    for letter, count in letters.items():
        by_script[unicodedata.name(letter, "").split(" ")[0].split("-")[0]] += count
    kana, han, others = (sum(by_script[name] for name in names) for names in (KANA, HAN, OTHERS))
    if 2 * (kana + han + others) <= letters.total():
        return "13a"
    if others > kana + han:
        return "flores200" if _has_flores() else "char"
    if 10 * kana > han:
        return "ja-mecab" if all(map(find_spec, ("MeCab", "ipadic"))) else "char"
    return "zh"


def bleu_caution(references: Iterable[str], tokenize: BleuTokenize) -> str | None:
    """A sentence on the words that BLEU counts, if 13a would find no spaces in the references; None otherwise."""
    texts = list(references)
    chosen = fitting_tokenizer(texts) if tokenize == "auto" else tokenize
    if chosen in ("13a", "intl", "none") and 2 * sum(len(text.split()) > 1 for text in texts) < len(texts):
        return (
            f"{chosen} finds no spaces in most references, and BLEU counts runs of four words: go by chrF, or give a "
            "--bleu-tokenize that cuts them (zh, ja-mecab, flores200, char)"
        )
    if tokenize == "auto" and chosen != "13a":
        return f"13a finds no spaces in this script: BLEU is by sacrebleu's tokenizer {chosen} (--bleu-tokenize)"
    return None


def deciding(metrics: Mapping[str, float], by: str) -> float:
    """The number by which models are compared: the lowest loss, or the highest of another metric.

    BLEU below 1 is that of chance. There the loss decides, as a negative number, below each BLEU that tells models
    apart.
    """
    return -metrics["loss"] if by == "bleu" and metrics[by] < LEAST_BLEU else metrics[by]


def _metric(tokenize: BleuTokenize, lowercase: bool) -> Any:
    try:
        return sacrebleu_metric("BLEU", tokenize=tokenize, lowercase=lowercase)
    except MissingExtraError:
        raise
    except (ImportError, RuntimeError, OSError) as error:  # a dictionary or a model is not here
        raise ArgumentError(
            f"bleu_tokenize {tokenize} is not installed ({' '.join(str(error).split())[:120]}): take char"
        ) from None


def _has_flores() -> bool:
    from sacrebleu.utils import SACREBLEU_DIR

    model = os.path.join(SACREBLEU_DIR, "models", "flores200sacrebleuspm")
    return find_spec("sentencepiece") is not None and os.path.exists(model)
