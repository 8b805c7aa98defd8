"""How well a translator's attention aligns words, compared with links that people drew."""

import re
from collections.abc import Iterable, Sequence
from itertools import islice, zip_longest
from typing import NamedTuple

import torch

from regard.errors import DataError
from regard.tasks.translation.alignments import AlignmentOf
from regard.tasks.translation.confidence import word_numbers
from regard.tasks.translation.translator import Translator
from regard.text.batches import collate
from regard.text.lines import StrPath, read_lines

LINK = re.compile(r"(\d+)([-?p])(\d+)")
TOGETHER_PAIRS = 32

Links = frozenset[tuple[int, int]]
"""Pairs of a source word and a target word, both counted from 0."""


class GoldLinks(NamedTuple):
    """The links of one pair of sentences as people drew them."""

    sure: Links
    possible: Links
    """All that are not wrong, the sure ones too."""
    place: str


def read_links(path: StrPath) -> list[GoldLinks]:
    """Read a file with the links of one pair on each line: `0-0 1-2` are sure, `3?4` or `3p4` only possible.

    Raises:
        DataError: the file cannot be read, or a line has something else; the message names it.
    """
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        sure, possible = set(), set()
        for cell in line.split():
            match = LINK.fullmatch(cell)
            if match is None:
                raise DataError(
                    f"{path}:{number}: expected links like 0-0 or 3?4 (source word, target word), got {cell!r}"
                )
            link = int(match[1]), int(match[3])
            possible.add(link)
            if match[2] == "-":
                sure.add(link)
        found.append(GoldLinks(frozenset(sure), frozenset(possible), f"{path}:{number}"))
    return found


def alignment_error_rate(found: Iterable[Links], gold: Iterable[GoldLinks]) -> float:
    r"""AER in percent, 0..100, over all pairs of a corpus together; lower is better.

    $$\mathrm{AER} = 1 - \frac{|A \cap S| + |A \cap P|}{|A| + |S|}$$

    Args:
        found: A, the links that were found in each pair.
        gold: S and P, those that people drew.

    Raises:
        DataError: there is no link at all, found or sure.

    Source: Och and Ney 2003, "A systematic comparison of various statistical alignment models", section 5.

    >>> gold = GoldLinks(frozenset({(0, 0), (1, 1)}), frozenset({(0, 0), (1, 1), (2, 1)}), "x:1")
    >>> alignment_error_rate([frozenset({(0, 0), (2, 1), (2, 2)})], [gold])
    40.0
    """
    right, total = 0, 0
    for links, (sure, possible, _) in zip(found, gold, strict=True):
        right += len(links & sure) + len(links & possible)
        total += len(links) + len(sure)
    if not total:
        raise DataError("there is no link in the alignment data, and none was found")
    return 100.0 * (1 - right / total)


def words_aligned(translator: Translator, pairs: Sequence[tuple[str, str]], alignment: AlignmentOf) -> list[Links]:
    """Each target word with the source word that its tokens attend to most while the target is forced.

    Words are what spaces part, as in the links.

    Raises:
        ArgumentError: the model has no such layer or head.
        DataError: a sentence is longer than the model takes.
    """
    found: list[Links] = []
    model, codecs = translator.model, (translator.source_tokenizer, translator.target_tokenizer)
    iterator = iter(enumerate(pairs, start=1))
    while some := list(islice(iterator, TOGETHER_PAIRS)):
        sides = [codec.encode_batch([pair[side] for _, pair in some]) for side, codec in enumerate(codecs)]
        for (number, _), source, target in zip(some, *sides, strict=True):
            longest = max(len(source), len(target)) + 1
            if model.max_length is not None and longest > model.max_length:
                raise DataError(f"pair {number}: {longest} tokens, and the model takes {model.max_length} at most")
        batch = collate(*sides, source_marks=codecs[0].marks, target_marks=codecs[1].marks)
        device = translator.device
        with torch.inference_mode():
            maps = model.attend(*(part.to(device) for part in batch[:3]))
            weights = alignment.of(maps, model.alignment_names).cpu()
        for (_, pair), row in zip(some, weights, strict=True):
            columns, rows = (word_numbers(codec.surfaces(text)) for codec, text in zip(codecs, pair, strict=True))
            sums = torch.zeros(len(pair[1].split()), len(pair[0].split()))
            for token, of in enumerate(rows):
                for place, word in enumerate(columns):
                    if of >= 0 and word >= 0:
                        sums[of, word] += row[token, place]
            best = sums.argmax(-1).tolist() if sums.shape[1] else []
            found.append(frozenset((word, of) for of, word in enumerate(best)))
    return found


def error_of(
    translator: Translator, pairs: Sequence[tuple[str, str]], gold: Sequence[GoldLinks], alignment: AlignmentOf
) -> float:
    """The alignment error rate of a translator on pairs whose links are known.

    Raises:
        DataError: the numbers of pairs and of lines of links differ, or a link names a word that is not there.
    """
    for pair, links in zip_longest(pairs, gold):
        if pair is None or links is None:
            raise DataError(f"expected a line of links for each pair, got {len(gold):,} lines and {len(pairs):,} pairs")
        counts = [len(side.split()) for side in pair]
        for source, target in sorted(links.possible):
            if source >= counts[0] or target >= counts[1]:
                within = f"words from 0 to {counts[0] - 1} and 0 to {counts[1] - 1}"
                raise DataError(f"{links.place}: expected {within}, got {source}-{target}")
    return alignment_error_rate(words_aligned(translator, pairs, alignment), gold)
