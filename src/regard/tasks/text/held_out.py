"""The data held out for validation: sources and documents that training does not see, as the tokenizer reads them.

Two texts of other bytes may be the same tokens: a letter in two encodings, a capital where all is read in lower case,
two spaces. The reading is decided before the vocabulary is learnt from the rest (`tokenizers.read_as`).
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np

from regard.tasks.text.running_text import TextPiece, TextStore
from regard.tasks.text.tokenizers import BOS

VALID_SHARE = 0.01
"""Share of the pairs split off for validation."""
MOST_VALID_PAIRS = 2_000
FEWEST_VALID_PAIRS = 20
"""The fewest pairs split off, unless this is more than a fifth of the data."""
MOST_OF_ONE_SOURCE = 0.25
"""The largest share of them that the pairs of one source may be, if there are others."""
MOST_SOURCES = 4 * MOST_VALID_PAIRS
ROWS = 2**20


def held_out_sources(sources: Iterable[str], count: int, reading: Callable[[str], str]) -> Callable[[str], bool]:
    """Make a function that says whether the pairs of a source are for validation.

    Sources are taken in the order of their digests until the pairs are as many as wanted: the same ones for every seed
    and every tokenizer that reads alike, so that runs can be compared. Those with more than a quarter of the wanted
    pairs come last. One source stays for training, and so does half of the pairs.
    `reading` is the text that the tokenizer makes of a text before it cuts it.
    """
    wanted = min(max(VALID_SHARE * count, min(FEWEST_VALID_PAIRS, count / 5)), MOST_VALID_PAIRS)

    def number(source: str) -> int:
        return int.from_bytes(hashlib.blake2b(reading(source).encode(), digest_size=8).digest(), "little")

    counts = _lowest(map(number, sources))
    limit = max(MOST_OF_ONE_SOURCE * wanted, 1)
    chosen, pairs = set[int](), 0
    for candidate in sorted(counts, key=lambda one: (counts[one] * (counts[one] > limit), one)):
        if pairs >= wanted or len(chosen) == len(counts) - 1:
            break
        if counts[candidate] <= limit or pairs + counts[candidate] <= max(2 * wanted, (not chosen) * count / 2):
            chosen.add(candidate)
            pairs += counts[candidate]
    return lambda source: number(source) in chosen


def _lowest(numbers: Iterable[int]) -> Counter[int]:
    """How often each of the lowest numbers is there. A number that was left out is above the bound for ever."""
    counts, bound = Counter[int](), 2**64
    for number in numbers:
        if number < bound:
            counts[number] += 1
            if len(counts) > 2 * MOST_SOURCES:
                counts = Counter({one: counts[one] for one in heapq.nsmallest(MOST_SOURCES, counts)})
                bound = max(counts) + 1
    return counts


def seen_documents(valid: TextStore, train: TextStore) -> frozenset[int]:
    """The numbers of the documents for validation that are in training as the same tokens."""
    numbers: dict[bytes, list[int]] = {}
    for number, digest in enumerate(_documents(valid)):
        numbers.setdefault(digest, []).append(number)
    return frozenset(number for digest in _documents(train) for number in numbers.pop(digest, ()))


def _documents(store: TextStore) -> Iterator[bytes]:
    begin = None
    for start in range(0, len(store), ROWS):
        for place in np.flatnonzero(store.tokens[start : start + ROWS] == BOS):
            if begin is not None:
                yield _digest(store, begin, start + int(place))
            begin = start + int(place)
    if begin is not None:
        yield _digest(store, begin, len(store))


def _digest(store: TextStore, begin: int, end: int) -> bytes:
    return hashlib.blake2b(store.tokens[begin:end].tobytes(), digest_size=16).digest()


def without(pieces: Iterable[TextPiece], documents: Collection[int]) -> Iterator[TextPiece]:
    number = -1
    for piece in pieces:
        number += piece.begins
        if number not in documents:
            yield piece
