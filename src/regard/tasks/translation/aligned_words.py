"""The words of given pairs, each linked with the source word that it attends to most."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.tasks.text.pair_store import chunks
from regard.tasks.translation.translation_model import AlignmentOf
from regard.tasks.translation.translator import WINDOW_LINES, Translator

TOGETHER_PAIRS = 32

Links = frozenset[tuple[int, int]]
"""Pairs of a source word and a target word, both counted from 0."""


class CutPair(NamedTuple):
    """A pair as tokens, and the number of the word each token belongs to; -1 for spaces alone."""

    source: Sequence[int]
    target: Sequence[int]
    source_words: Sequence[int]
    target_words: Sequence[int]


def words_aligned(translator: Translator, pairs: Iterable[tuple[str, str]], alignment: AlignmentOf) -> Iterator[Links]:
    """Each target word with the source word its tokens attend to most while the target is forced. Spaces part words,
    and pairs are read a window at a time, so that memory does not grow with their number."""
    done = 0
    for window in chunks(pairs, WINDOW_LINES):
        cut = _cut_pairs(translator, window, after=done)
        found: dict[int, Links] = {}
        for rows in chunks(sorted(range(len(cut)), key=lambda n: len(cut[n].source)), TOGETHER_PAIRS):
            found.update(zip(rows, _links_found(translator, [cut[n] for n in rows], alignment), strict=True))
        yield from (found[n] for n in range(len(cut)))
        done += len(cut)


def as_line(links: Links) -> str:
    """Links in the Pharaoh format.

    >>> as_line(frozenset({(1, 2), (0, 0)}))
    '0-0 1-2'
    """
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def word_numbers(surfaces: Sequence[str]) -> list[int]:
    """For each token the number of its word, as spaces part them; -1 for spaces alone."""
    is_blank = [bool(surface) and not surface.strip() for surface in surfaces]
    begins = [
        not is_blank[n] and (n == 0 or is_blank[n - 1] or surface[:1].isspace() or surfaces[n - 1][-1:].isspace())
        for n, surface in enumerate(surfaces)
    ]
    numbers, last = [], -1
    for blank, begin in zip(is_blank, begins, strict=True):
        last += begin
        numbers.append(-1 if blank else last)
    return numbers


def _cut_pairs(translator: Translator, pairs: Sequence[tuple[str, str]], *, after: int) -> list[CutPair]:
    ids = translator.encode_pairs(pairs, after=after)
    codecs = translator.source_tokenizer, translator.target_tokenizer
    words = [[word_numbers(codec.surfaces(pair[side])) for pair in pairs] for side, codec in enumerate(codecs)]
    return [CutPair(*parts) for parts in zip(*ids, *words, strict=True)]


def _links_found(translator: Translator, pairs: Sequence[CutPair], alignment: AlignmentOf) -> list[Links]:
    batch = translator.collate([pair.source for pair in pairs], [pair.target for pair in pairs])
    with torch.no_grad():
        maps = translator.model.attend(batch.source, batch.source_lengths, batch.target_input)
        weights = alignment.of(maps, translator.model.alignment_names).cpu()
    return [_most_looked_at(row, pair) for row, pair in zip(weights, pairs, strict=True)]


def _most_looked_at(weights: Tensor, pair: CutPair) -> Links:
    rows, columns = (torch.tensor(words, dtype=torch.long) for words in (pair.target_words, pair.source_words))
    sums = weights.new_zeros([int(words.max()) + 1 if len(words) else 0 for words in (rows, columns)])
    if not sums.numel():
        return frozenset()
    places = [(words >= 0).nonzero()[:, 0] for words in (rows, columns)]
    block = weights[places[0]][:, places[1]]
    sums.index_put_((rows[places[0]][:, None], columns[places[1]][None]), block, accumulate=True)
    return frozenset((word, of) for of, word in enumerate(sums.argmax(-1).tolist()))
