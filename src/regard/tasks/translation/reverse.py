"""Choose among the translations that a search found by how well they lead back to their sources: a noisy channel."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from regard.errors import ArgumentError
from regard.tasks.generation.config import Beam
from regard.tasks.generation.protocol import Hypothesis
from regard.tasks.language_modelling.likelihood import Likelihood
from regard.tasks.text.codec import Codec
from regard.tasks.translation.made_model import Model

IMPOSSIBLE = -1e6
"""Stands for the log-probability of a source that the other translator can never write."""


class BackTranslator(Protocol):
    """The methods of a translator of the other direction; `Translator` has them."""

    model: Model
    source_tokenizer: Codec
    target_tokenizer: Codec

    def score(self, pairs: Iterable[tuple[str, str]]) -> Iterator[Likelihood]:
        """How probable each target is, given its source."""
        ...

    def fingerprint(self) -> str:
        """Differs for models whose weights differ."""
        ...


@dataclass(frozen=True, slots=True)
class Reverse:
    r"""A translator of the other direction, which has a say in the best translation y of a source x.

    $$\frac{\log p(y \mid x) + \gamma |y| + \mu \log p(x \mid y)}{|y|^\alpha}$$

    is the score of a hypothesis then, where mu is `weight`; gamma and alpha are the reward and the penalty of length
    (`regard.tasks.generation.Beam`).

    Raises:
        ArgumentError: the weight is out of its range.

    Source: the noisy channel of Yee, Dauphin and Auli 2019 (arXiv:1908.05731), without a language model and with one
    divisor for both directions.
    """

    translator: BackTranslator
    """It translates from the target's language into the source's."""
    weight: float = 0.3
    """Mu, above 0 and finite; 0.1 to 0.5 are usual."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ArgumentError(f"the weight of a reverse translator must be above 0 and finite, got {self.weight}")


def log_probabilities_back(
    translator: BackTranslator, sources: Sequence[str], texts: Sequence[Sequence[str]]
) -> list[list[float]]:
    """The log-probability of each source given each of its translations, in nats.

    A translation of more tokens than the translator takes gets the least of the others of its sentence; where no other
    is left, or the source is too long, all get 0 and keep the order they have.
    """
    longest = translator.model.max_length
    pairs = [(text, source) for source, some in zip(sources, texts, strict=True) for text in some]
    read = translator.source_tokenizer.encode_batch([text for text, _ in pairs])
    written = translator.target_tokenizer.encode_batch([source for _, source in pairs])
    fits = [longest is None or max(len(a), len(b)) < longest for a, b in zip(read, written, strict=True)]
    scored = translator.score(pair for pair, is_taken in zip(pairs, fits, strict=True) if is_taken)
    found = iter([max(next(scored).log_probability, IMPOSSIBLE) if is_taken else None for is_taken in fits])
    answers = []
    for some in texts:
        gains = list(islice(found, len(some)))
        least = min((gain for gain in gains if gain is not None), default=0.0)
        answers.append([least if gain is None else gain for gain in gains])
    return answers


def reranked(
    found: Sequence[Sequence[Hypothesis]],
    back: Sequence[Sequence[float]],
    *,
    weight: float,
    beam: Beam,
    end_id: int,
) -> list[list[Hypothesis]]:
    """The `beam.num_best` best hypotheses of each sentence: those that ended, best first, then those cut off.

    >>> short, long = Hypothesis([5, 2], -1.0), Hypothesis([5, 6, 2], -1.2)
    >>> beam = Beam(2, length_penalty=0.0)
    >>> ((best,),) = reranked([[short, long]], [[-9.0, -8.0]], weight=0.5, beam=beam, end_id=2)
    >>> best.tokens, best.score
    ([5, 6, 2], -5.2)
    """
    answers = []
    for some, gains in zip(found, back, strict=True):
        scored = [
            replace(one, score=one.score + weight * gain / len(one.tokens) ** beam.length_penalty)
            for one, gain in zip(some, gains, strict=True)
        ]
        scored.sort(key=lambda one: (one.tokens[-1:] == [end_id], one.score), reverse=True)
        answers.append(scored[: beam.num_best])
    return answers
