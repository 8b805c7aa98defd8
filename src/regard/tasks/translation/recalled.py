"""Which pairs a translator remembers speak for each token of a translation."""

from typing import Any, NamedTuple

import torch

from regard.errors import ArgumentError
from regard.models.token_memory import RememberingOutput, read_by_output
from regard.tasks.translation.translator import Translator


class Recalled(NamedTuple):
    """A remembered pair, and its vote for a token."""

    weight: float
    """The part of the memory's vote that the pair has at this token, 0..1, whatever token it votes for."""
    token: str
    """The token for which its nearest place votes."""
    source: str
    target: str


class RecalledToken(NamedTuple):
    """A token of a translation, and the pairs asked about it."""

    label: str
    probability: float
    """That of the token, given those before it, by model and memory together."""
    vote: float
    """The part of the memory's vote that is for this token, 0..1."""
    pairs: list[Recalled]
    """Those with the largest weights, the largest first."""


@torch.no_grad()
def recalled(translator: Translator, source: str, target: str, *, most: int = 3) -> list[RecalledToken]:
    """Ask the memory about each token of a translation, which may be the translator's own or another.

    Args:
        translator: one loaded with a memory: `Translator.load(run, memories=[file])`; not an ensemble.
        source: the sentence.
        target: its translation.
        most: so many pairs are told for each token.

    Returns:
        The tokens of the target and its end mark.

    Raises:
        ArgumentError: the translator has no memory, or the source is empty.
        DataError: a sentence is longer than the model's positions.
    """
    output: Any = translator.model.output
    if not isinstance(output, RememberingOutput):
        raise ArgumentError("this translator has no memory: load it with memories=[...], and without an ensemble")
    ids, forced = translator.encode_pairs([(source, target)])
    if not ids[0]:
        raise ArgumentError("expected a source with at least one token, got an empty one")
    batch = translator.collate(ids, forced)
    (read,) = read_by_output(translator.model, batch.source, batch.source_lengths, batch.target_input)
    right = batch.target_output[0]
    probabilities = output(read).exp().gather(-1, right[:, None])[:, 0].tolist()
    places, weights = output.voters(read)
    votes = (weights * (output.memory.tokens[places] == right[:, None])).sum(-1).tolist()
    labels = [_label(translator, token) for token in right.tolist()]
    told = (_pairs(translator, output, *row, most) for row in zip(places.tolist(), weights.tolist(), strict=True))
    return [RecalledToken(*parts) for parts in zip(labels, probabilities, votes, told, strict=True)]


def _pairs(
    translator: Translator, output: RememberingOutput, places: list[int], weights: list[float], most: int
) -> list[Recalled]:
    """The pairs of these places, each with the sum of its places' weights."""
    memory = output.memory
    sums: dict[int, float] = {}
    nearest: dict[int, int] = {}
    for place, weight in zip(places, weights, strict=True):
        pair = int(memory.pairs[place])
        sums[pair] = sums.get(pair, 0.0) + weight
        nearest.setdefault(pair, place)
    best = sorted(sums, key=lambda pair: -sums[pair])[:most]
    tokens = [_label(translator, int(memory.tokens[nearest[pair]])) for pair in best]
    return [Recalled(sums[pair], token, *memory.texts[pair]) for pair, token in zip(best, tokens, strict=True)]


def _label(translator: Translator, token: int) -> str:
    return translator.target_tokenizer.labels([token])[0][0]
