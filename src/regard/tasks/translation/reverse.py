"""Choose among the translations that a search found by how well they lead back to their sources: a noisy channel."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from regard.errors import ArgumentError
from regard.tasks.generation.config import Beam
from regard.tasks.generation.protocol import Hypothesis
from regard.tasks.translation.searching import Begun
from regard.tasks.translation.translation_model import TranslationModel

IMPOSSIBLE = -1e6
"""Stands for the log-probability of a source that the other translator can never write."""


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

    translator: TranslationModel
    """It translates from the target's language into the source's."""
    weight: float = 0.3
    """Mu, above 0 and finite; 0.1 to 0.5 are usual."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ArgumentError(f"the weight of a reverse translator must be above 0 and finite, got {self.weight}")


def log_probabilities_back(
    translator: TranslationModel, sources: Sequence[str], texts: Sequence[Sequence[str]]
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


@dataclass(frozen=True, slots=True)
class Rerank:
    """The stage behind a search that leaves the `beam.num_best` best hypotheses of each sentence, by `Reverse`.

    Those that ended come first, best first, then those that were cut off.
    """

    model: TranslationModel
    reverse: Reverse
    beam: Beam

    def __call__(self, begun: Sequence[Begun], found: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        tokenizer, penalty, answers = self.model.target_tokenizer, self.beam.length_penalty, []
        texts = [[tokenizer.decode(one.tokens) for one in some] for some in found]
        back = log_probabilities_back(self.reverse.translator, [one.text for one in begun], texts)
        for some, gains in zip(found, back, strict=True):
            scored = [
                replace(one, score=one.score + self.reverse.weight * gain / len(one.tokens) ** penalty)
                for one, gain in zip(some, gains, strict=True)
            ]
            scored.sort(key=lambda one: (one.tokens[-1:] == [tokenizer.marks.end_id], one.score), reverse=True)
            answers.append(scored[: self.beam.num_best])
        return answers
