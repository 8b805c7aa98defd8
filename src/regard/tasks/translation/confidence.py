"""How sure a translator was of each token, and which source words little of its attention fell on."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.tasks.pictures.token_maps import Axis
from regard.tasks.text.word_shares import shares
from regard.tasks.text.words import is_word, stretches, units

LITTLE = 0.1
"""A source word is perhaps untranslated if all target tokens together gave it less than this much attention."""


class Confidence(NamedTuple):
    """Measures of confidence in a translation."""

    probabilities: list[float]
    """The probability of each label of the translation, given those before it, 0..1."""
    entropies: list[float]
    """The entropy in nats of the attention of each label, 0..log(labels of the source): spread, it is unsure."""
    coverage: list[float]
    """The attention each label of the source got from the whole translation, 0..labels of the translation."""
    untranslated: list[str]
    """The words of the source that got less than 0.1, in order."""


def confidence_of(
    log_probabilities: Tensor, alignment: Tensor, written: Axis, source: str, surfaces: Sequence[str], looked_at: Axis
) -> Confidence:
    r"""Measure by one pass over a finished translation.

    The entropy is $-\sum_j a_{ij} \log a_{ij}$ of a row, the coverage $\sum_i a_{ij}$ of a column (Tu et al. 2016,
    arXiv:1601.04811, section 3.1, without their fertility). Attention is not proof: a head that aligns badly covers
    badly too. Choose one that aligns.

    Args:
        log_probabilities: (T,), of each token, in nats.
        alignment: (T, S), a row for each token; a column for each token of the source and its end mark.
        written: the labels of the tokens.
        source: the sentence.
        surfaces: the stretch of the sentence each of its tokens stands for.
        looked_at: the labels of the source's tokens.
    """
    precise = alignment.cpu().double()
    entropies = torch.special.entr(precise).sum(-1)
    columns = precise.sum(0)
    return Confidence(
        [float(log_probabilities[first : last + 1].sum().exp()) for first, last in written.spans],
        [float(entropies[first : last + 1].mean()) for first, last in written.spans],
        [float(columns[first : last + 1].sum()) for first, last in looked_at.spans],
        _untranslated(columns, source, surfaces),
    )


def _untranslated(columns: Tensor, source: str, surfaces: Sequence[str]) -> list[str]:
    """The words of a sentence whose tokens got little in all.

    >>> _untranslated(torch.tensor([0.05, 0.01, 0.9, 0.02, 1.2]), "un chat !", ["u", "n", " chat", " !"])
    ['un']
    """
    words, places = units(source), stretches(surfaces, source)
    sums = (columns[: len(places)].double() @ shares(places, words).double()).tolist()
    found = [source[begin:end] for (begin, end), total in zip(words, sums, strict=True) if total < LITTLE]
    return [word for word in found if is_word(word)]
