"""Pairs as tokens that know the words they are of."""

from collections.abc import Sequence
from typing import NamedTuple

from regard.tasks.text.codec import Codec
from regard.tasks.translation.confidence import word_numbers


class CutPair(NamedTuple):
    """A pair as tokens, and the number of the word each token belongs to; -1 for spaces alone."""

    source: Sequence[int]
    target: Sequence[int]
    source_words: Sequence[int]
    target_words: Sequence[int]


def cut_pairs(pairs: Sequence[tuple[str, str]], codecs: tuple[Codec, Codec]) -> list[CutPair]:
    """Pairs as the tokens of a source's and a target's tokenizer. Spaces part words."""
    ids = [codec.encode_batch([pair[side] for pair in pairs]) for side, codec in enumerate(codecs)]
    words = [[word_numbers(codec.surfaces(pair[side])) for pair in pairs] for side, codec in enumerate(codecs)]
    return [CutPair(*parts) for parts in zip(*ids, *words, strict=True)]
