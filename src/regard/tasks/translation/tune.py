"""Choose on validation pairs how a search counts length, and how much a reverse translator has to say."""

import sys
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from regard.errors import ArgumentError, DataError
from regard.tasks.generation.config import Beam
from regard.tasks.telling import Tell, tell_nobody
from regard.tasks.text.unicode import normalise
from regard.tasks.training.bleu import BleuCounts, BleuTokenize
from regard.tasks.translation.options import TranslationOptions
from regard.tasks.translation.reverse import log_probabilities_back
from regard.tasks.translation.translator import EVALUATED_TOGETHER, Translator

REWARDS = tuple(tenth / 10 for tenth in range(13))
"""The rewards of each token tried, in nats."""
WEIGHTS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0)
"""The weights of a reverse translator tried."""


class Tuned(NamedTuple):
    """A way to choose among the hypotheses of a search, and how good its choice is on the validation pairs."""

    length_penalty: float
    length_reward: float
    weight: float
    """Of the reverse translator; 0 leaves it out."""
    bleu: float


class _Pool(NamedTuple):
    """The hypotheses of all sentences, one sentence after the other."""

    first: np.ndarray
    """Where the hypotheses of each sentence begin."""
    forward: np.ndarray
    """Log-probability given the source, in nats."""
    back: np.ndarray
    """Log-probability of the source given the hypothesis, in nats; 0 without a reverse translator."""
    lengths: np.ndarray
    """Tokens, end marks included."""
    cut_off: np.ndarray
    """Whether a hypothesis was cut off in a sentence of which others ended: such a one is never taken."""
    counts: np.ndarray
    """The counts of BLEU for each."""
    counter: BleuCounts


def tune(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    *,
    beam_size: int = 10,
    reverse: Translator | None = None,
    bleu_tokenize: BleuTokenize = "auto",
    tell: Tell = tell_nobody,
) -> list[Tuned]:
    """Look which choice among the hypotheses that a search finds for each source translates the pairs best, by BLEU.

    All choices are made among the same hypotheses, those of a beam with a length penalty of 1. A search with the
    reward chosen here may find others, so that its BLEU differs a little. The figure of the usual choice is that of
    `Translator.evaluate`, which searches for one translation.

    Returns:
        The best choice, the best without the reverse translator, and the choice of a search that is not told
        anything (a length penalty of 1, no reward), in the order of their BLEU.
    """
    if beam_size < 2:
        raise ArgumentError(f"a choice among hypotheses needs a beam of 2 at least, got {beam_size}")
    if not pairs:
        raise DataError("there are no pairs to tune on")
    lowercase = translator.target_tokenizer.lowercases
    targets = [normalise(target) for _, target in pairs]
    counts = BleuCounts(targets, lowercase=lowercase, tokenize=bleu_tokenize)
    pool = _searched(translator, pairs, Beam(beam_size, num_best=beam_size), reverse, counts, tell)
    tried = [_tried(pool, 0.0, reward, weight) for weight, reward in product((0.0, *WEIGHTS), REWARDS)]
    alone = [one for one in tried if not one.weight]
    sources = [source for source, _ in pairs]
    found = translator.translate_whole(sources, TranslationOptions(beam=Beam(beam_size)), tell=tell)
    usual = Tuned(1.0, 0.0, 0.0, counts.score(counts.of([one.text for one in found], targets)))
    # Of choices that are equally good, the first has the smallest reward and weight.
    best = (
        {_best([usual, *alone]), usual} if reverse is None else {_best([usual, *tried]), _best([usual, *alone]), usual}
    )
    return sorted(best, key=lambda one: (-one.bleu, one.weight, one.length_reward))


def _best(tried: Sequence[Tuned]) -> Tuned:
    return max(tried, key=lambda one: one.bleu)


def _searched(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    beam: Beam,
    reverse: Translator | None,
    counter: BleuCounts,
    tell: Tell,
) -> _Pool:
    options = TranslationOptions(beam=beam, max_length=translator.model.max_length or sys.maxsize)
    end_id, sizes = translator.target_tokenizer.marks.end_id, list[int]()
    rows, counts = list[tuple[float, float, int, bool]](), list[list[float]]()
    for begin in range(0, len(pairs), EVALUATED_TOGETHER):
        tell("sentences translated", begin, len(pairs))
        some = pairs[begin : begin + EVALUATED_TOGETHER]
        sources = [normalise(source) for source, _ in some]
        for number, ids in enumerate(translator.source_tokenizer.encode_batch(sources), start=begin + 1):
            if problem := translator.problem(ids, longest=options.max_length):
                raise DataError(f"pair {number}: {problem}")
        found = translator.hypotheses(sources, options)
        texts = [[translator.target_tokenizer.decode(one.tokens) for one in best] for best in found]
        back = [[0.0] * len(best) for best in found]
        if reverse is not None:
            back = log_probabilities_back(reverse, sources, texts)
        for best, written, gains, (_, target) in zip(found, texts, back, some, strict=True):
            # An empty source has no hypothesis: its translation is empty.
            sizes.append(max(len(best), 1))
            ended = [one.tokens[-1:] == [end_id] for one in best]
            rows += [
                (one.score * len(one.tokens), gain, len(one.tokens), any(ended) and not has_ended)
                for one, gain, has_ended in zip(best, gains, ended, strict=True)
            ] or [(0.0, 0.0, 1, False)]
            counts += [counter.of([text], [normalise(target)]) for text in written or [""]]
    forward, gained, lengths, cut_off = np.array(rows, dtype=np.float64).T
    first = np.cumsum([0, *sizes[:-1]])
    return _Pool(first, forward, gained, lengths, cut_off > 0, np.array(counts), counter)


def _tried(pool: _Pool, penalty: float, reward: float, weight: float) -> Tuned:
    score = (pool.forward + reward * pool.lengths + weight * pool.back) / pool.lengths**penalty
    score[pool.cut_off] = -np.inf
    chosen = [
        first + int(part.argmax()) for first, part in zip(pool.first, np.split(score, pool.first[1:]), strict=True)
    ]
    return Tuned(penalty, reward, weight, pool.counter.score(pool.counts[chosen].sum(0)))
