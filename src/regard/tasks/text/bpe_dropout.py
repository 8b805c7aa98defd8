"""BPE dropout: other tokens for the same text in every epoch, by leaving out merges at random."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError, DataError
from regard.files.untrusted import parse_json
from regard.tasks.text.sections import Indices, Integers
from regard.tasks.text.tokenizer_files import encoding, read_tokenizer
from regard.tasks.text.tokenizers import Tokenizer
from regard.tensors.ranges import require_share

Bits = npt.NDArray[np.uint64]

REMEMBERED_SENTENCES = 2**17
"""The sentences with cached word ends; a few hundred bytes each."""
NO_MERGE = np.iinfo(np.int64).max
"""The rank of neighbours without a merge, above all ranks."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The step of SplitMix64 from one state to the next."""


class BPEDropout:
    """Tokenises sentences as byte-level BPE, leaving out each possible merge with a probability p.

    In each round, every possible merge of neighbours within a word is left out with probability p; of the others the
    one learnt first is made. A word is finished when a round leaves out all its merges. With p = 0 the tokens are the
    tokenizer's, with p = 1 single bytes.

    The dropout of the `tokenizers` library leaves out fewer (impossible merges use up its draws), and its generator
    cannot be seeded. Here the draws are a function of the caller's key, of the position in the sentence and of the
    round (SplitMix64, Steele et al. 2014, "Fast splittable pseudorandom number generators"). So a key decides the
    tokens of its sentence, whatever the batch.

    Args:
        tokenizer: a byte-level BPE tokenizer.
        probability: p in 0..1; the paper takes 0.1 for most languages.

    Source: Provilkov et al. 2020 (arXiv:1910.13267), algorithm 1.

    >>> from regard.tasks.text.tokenizer_recipes import ByteLevelBPE
    >>> tokenizer = ByteLevelBPE(vocab_size=280).train(["unrelated news is relayed"] * 9)
    >>> ids = np.array(tokenizer.encode("unrelated"))
    >>> for probability in (0.0, 0.3, 1.0):
    ...     [cut] = BPEDropout(tokenizer, probability)([ids], np.array([13], np.uint64))
    ...     print([tokenizer.decode([i]) for i in cut], tokenizer.decode(cut.tolist()))
    ['unrelated'] unrelated
    ['u', 'n', 'rela', 'ted'] unrelated
    ['u', 'n', 'r', 'e', 'l', 'a', 't', 'e', 'd'] unrelated
    """

    def __init__(self, tokenizer: Tokenizer, probability: float) -> None:
        require_share(bpe_dropout=probability)
        if not tokenizer.has_merges:
            raise ArgumentError(f"expected a tokenizer with merges (bpe) for BPE dropout, got {tokenizer!r}")
        described: dict[str, Any] = parse_json(tokenizer.to_json())["model"]
        self._tokenizer, self._probability = tokenizer, probability
        self._words = read_tokenizer(tokenizer.to_json()).pre_tokenizer
        self._word_sizes: dict[bytes, Indices] = {}
        vocabulary = described["vocab"]
        self._size = max(vocabulary.values()) + 1
        self._byte_counts, self._spelling = _spelled(vocabulary, self._size)
        self._spelling_begins = _begins(self._byte_counts)
        merges = [[vocabulary[piece] for piece in (a, b, a + b)] for a, b in described["merges"]]
        table = np.array(merges, np.int64).reshape(-1, 3)
        pairs = table[:, 0] * self._size + table[:, 1]
        order = np.argsort(pairs, kind="stable")
        # A pair beyond the last rank finds the last entry, which equals no pair.
        self._pairs = np.append(pairs[order], NO_MERGE)
        self._ranks = np.append(order, NO_MERGE)
        self._merged = table[:, 2]

    def __call__(self, sentences: Sequence[Integers], keys: Bits) -> list[Indices]:
        """Tokenise some sentences anew.

        Args:
            sentences: the tokens of each by the tokenizer, without special tokens.
            keys: 64 random bits for each sentence, which decide its tokens.

        Returns:
            The new tokens of each sentence. They decode to the same text.
        """
        words = [self._sizes_of_words(sentence) for sentence in sentences]
        tokens, word_sizes = _joined(sentences), _joined(words)
        # All bytes are in one row; a piece is at the position of its first byte, and -1 at the others.
        begins, word_begins = _begins(self._byte_counts[tokens]), _begins(word_sizes)
        pieces = np.full(begins[-1], -1)
        pieces[begins[:-1]] = tokens
        ends = np.cumsum([int(some.sum()) for some in words])
        numbers = np.repeat(np.arange(len(words)), [len(some) for some in words])
        offsets = word_begins[:-1] - np.append(0, ends)[numbers]
        streams = _mixed(keys[numbers] + offsets.astype(np.uint64) * GOLDEN)
        counts = np.add.reduceat(pieces >= 0, word_begins[:-1]) if len(word_sizes) else word_sizes
        first_left_out, changes = self._first_left_out(streams, word_sizes - counts)
        places = np.flatnonzero(np.repeat(changes, word_sizes))
        spelled = np.repeat(self._spelling_begins[tokens] - begins[:-1], self._byte_counts[tokens])
        symbols = self._spelling[places + spelled[places]]
        of_word = np.repeat(np.arange(int(changes.sum())), word_sizes[changes])
        inside = (places - np.repeat(word_begins[:-1][changes], word_sizes[changes])).astype(np.uint64)
        pieces[places] = self._merge(symbols, of_word, _mixed(streams[changes][of_word] + inside), first_left_out)
        kept = np.cumsum(pieces >= 0)
        return np.split(pieces[pieces >= 0], kept[ends[:-1] - 1])

    def _sizes_of_words(self, sentence: Integers) -> Indices:
        """The bytes of each word of a sentence: pieces merge only within words."""
        key = sentence.astype(np.int32).tobytes()
        known = self._word_sizes.get(key)
        if known is not None:
            return known
        text = self._tokenizer.decode(sentence.tolist())
        with encoding():
            words = self._words.pre_tokenize_str(text)
        sizes = np.array([len(word) for word, _ in words], np.int64)
        if sizes.sum() != self._byte_counts[sentence].sum():
            raise DataError(f"expected the tokens of a text for BPE dropout, got {sentence.tolist()}")
        if len(self._word_sizes) < REMEMBERED_SENTENCES:
            self._word_sizes[key] = sizes
        return sizes

    def _first_left_out(self, streams: Bits, merges: Indices) -> tuple[Indices, npt.NDArray[np.bool_]]:
        """Draw the round in which a word first leaves out the merge it makes without dropout.

        A word keeps its tokens while the best merge of each round is made, whatever happens to the others. So the
        number of such rounds is geometric, and words with as many rounds as merges need no work.

        Returns:
            The round for each word that changes, and the mask of these words.
        """
        draws = (_mixed(streams) >> np.uint64(11)) * 2.0**-53
        if self._probability in (0.0, 1.0):
            rounds = np.full(len(draws), 0.0 if self._probability else np.inf)
        else:
            rounds = np.floor(np.log1p(-draws) / math.log1p(-self._probability))
        changes = rounds < merges
        return rounds[changes].astype(np.int64), changes

    def _merge(self, symbols: Indices, words: Indices, streams: Bits, first_left_out: Indices) -> Indices:
        """Merge the bytes of words to the end; pieces are at the positions of their first bytes."""
        finished = np.full(len(symbols), -1)
        places, ranks = np.arange(len(symbols)), np.full(len(symbols), NO_MERGE)
        changed, number = places, 0
        while len(symbols):
            ranks[changed] = self._ranks_at(changed, symbols, words)
            merged = self._chosen(ranks, words, streams, first_left_out, number)
            goes_on = np.zeros(len(first_left_out), bool)
            goes_on[words[merged]] = True
            kept = goes_on[words]
            finished[places[~kept]] = symbols[~kept]
            symbols[merged] = self._merged[ranks[merged]]
            kept[merged + 1] = False  # the right halves
            changed = np.cumsum(kept)[merged] - 1
            changed = np.concatenate([changed, np.maximum(changed - 1, 0)])
            symbols, words, places = symbols[kept], words[kept], places[kept]
            streams, ranks = streams[kept], ranks[kept]
            number += 1
        return finished

    def _ranks_at(self, places: Indices, symbols: Indices, words: Indices) -> Indices:
        """The rank of the merge of each of these symbols with the next one of its word."""
        following = np.minimum(places + 1, len(symbols) - 1)
        pairs = symbols[places] * self._size + symbols[following]
        found = np.searchsorted(self._pairs, pairs)
        known = (self._pairs[found] == pairs) & (words[places] == words[following]) & (places != following)
        return np.where(known, self._ranks[found], NO_MERGE)

    def _chosen(self, ranks: Indices, words: Indices, streams: Bits, first_left_out: Indices, number: int) -> Indices:
        """The best merge of each word in a round, without those left out."""
        possible = np.flatnonzero(ranks != NO_MERGE)
        rounds = first_left_out[words[possible]]
        state = np.uint64((number + 1) * int(GOLDEN) % 2**64)
        draws = (_mixed(streams[possible] + state) >> np.uint64(11)) * 2.0**-53
        left_out = (draws < self._probability) & (number > rounds)
        now = np.equal(rounds, number)
        if now.any():
            left_out |= now & ((draws < self._probability) | np.isin(possible, _best(possible[now], ranks, words)))
        return _best(possible[~left_out], ranks, words)


class NewCuts:
    """Pairs of sentences with new tokens in every epoch, which depend on seed, epoch and the pair's index alone.

    Args:
        source: tokenises the sources.
        target: tokenises the targets.
        seed: the seed of the run.
        max_length: a sentence longer than this afterwards, with its end mark, stays unchanged.
        max_tokens: a pair longer than this afterwards, with both end marks, stays unchanged.
    """

    def __init__(self, source: BPEDropout, target: BPEDropout, *, seed: int, max_length: int, max_tokens: int) -> None:
        self._sides, self._seed = (source, target), seed
        self._max_length, self._max_tokens = max_length, max_tokens

    def __call__(
        self, sources: Sequence[Integers], targets: Sequence[Integers], *, numbers: Sequence[int], epoch: int
    ) -> tuple[list[Integers], list[Integers]]:
        """The sources and targets as other tokens."""
        fresh = list[list[Integers]]()
        for side, (cut, sentences) in enumerate(zip(self._sides, (sources, targets), strict=True)):
            state = np.random.SeedSequence([self._seed, epoch, side]).generate_state(1, np.uint64)
            keys = _mixed(state + np.array(numbers, np.uint64) * GOLDEN)
            found = zip(cut(sentences, keys), sentences, strict=True)
            fresh.append([new if len(new) < self._max_length else old for new, old in found])
        for place, (source, target) in enumerate(zip(*fresh, strict=True)):
            if len(source) + len(target) + 2 > self._max_tokens:
                fresh[0][place], fresh[1][place] = sources[place], targets[place]
        return fresh[0], fresh[1]


def _best(places: Indices, ranks: Indices, words: Indices) -> Indices:
    """Among these positions, the one of each word with the merge learnt first; of equal ones, the left."""
    if not len(places):
        return places
    starts = np.flatnonzero(_differs(words[places]))
    best = np.minimum.reduceat(ranks[places], starts)
    equal = places[ranks[places] == np.repeat(best, np.diff(np.append(starts, len(places))))]
    return equal[_differs(words[equal])]


def _spelled(vocabulary: dict[str, int], size: int) -> tuple[Indices, Indices]:
    """The byte counts of the tokens, and the tokens of their single bytes in a row."""
    spelling = [""] * size
    for piece, number in vocabulary.items():
        spelling[number] = piece
    return _joined([[len(piece)] for piece in spelling]), _joined([[vocabulary[c] for c in p] for p in spelling])


def _joined(rows: Sequence[Integers] | Sequence[Sequence[int]]) -> Indices:
    return np.concatenate([*rows, np.zeros(0, np.int64)]).astype(np.int64)


def _begins(sizes: Indices) -> Indices:
    """The starts of consecutive parts of these sizes, and the end of the last."""
    return np.append(0, np.cumsum(sizes))


def _differs(values: Indices) -> npt.NDArray[np.bool_]:
    return np.append(True, values[1:] != values[:-1])


def _mixed(state: Bits) -> Bits:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
