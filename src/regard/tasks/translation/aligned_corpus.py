"""Links between words, as a run keeps them: those of tokens for training, those of words for validation."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from regard.errors import DataError, RunFolderError
from regard.files.atomic import replacing
from regard.files.untrusted import parse_json
from regard.tasks.text.codec import Codec
from regard.tasks.text.lines import Lines
from regard.tasks.text.links import GoldLinks, LinkedPair, links_of
from regard.tasks.text.pair_store import TokenStore, chunks
from regard.tasks.text.tokenizers import Tokenizer
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


CHUNK_PAIRS = 1_024
MOST_TOKENS = 2**31 - 1
"""Places of tokens are below it."""


class AlignedPair(NamedTuple):
    """A pair for validation as tokens, with the links of its words."""

    pair: CutPair
    links: GoldLinks


def token_links(pair: CutPair, links: GoldLinks) -> tuple[list[int], list[int]]:
    """The places of the source tokens and of the target tokens linked with one another.

    All tokens of a word are linked with all tokens of the words it is surely linked with (Garg et al. 2019,
    arXiv:1909.02074, section 4.3, give the probability of a target token to these in equal shares).

    >>> pair = CutPair([7, 8, 9], [5, 6], [0, 0, 1], [0, 1])
    >>> token_links(pair, links_of("0-1 1-0", ""))
    ([2, 0, 1], [0, 1, 1])
    """
    sides = [_tokens_of_words(words) for words in (pair.source_words, pair.target_words)]
    found = sorted(
        (target, source)
        for word, of in links.sure
        for source in sides[0].get(word, ())
        for target in sides[1].get(of, ())
    )
    return [source for _, source in found], [target for target, _ in found]


def _tokens_of_words(words: Sequence[int]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for token, word in enumerate(words):
        tokens.setdefault(word, []).append(token)
    return tokens


def _cut(pairs: Iterable[LinkedPair], codecs: tuple[Tokenizer, Tokenizer]) -> Iterator[AlignedPair]:
    for chunk in chunks(pairs, CHUNK_PAIRS):
        cut = cut_pairs([(pair.source, pair.target) for pair in chunk], codecs)
        for one, pair in zip(cut, chunk, strict=True):
            yield AlignedPair(one, links_of(pair.links, "the links"))


def store_links(path: Path, pairs: Iterable[LinkedPair], codecs: tuple[Tokenizer, Tokenizer]) -> None:
    """Write the linked tokens of each pair to a file, where they stand as the tokens do in that of the text."""
    found = (token_links(one.pair, one.links) for one in _cut(pairs, codecs))
    TokenStore.of_numbers(path, found, *codecs, count=MOST_TOKENS)


def write_aligned(path: Path, pairs: Iterable[LinkedPair], codecs: tuple[Tokenizer, Tokenizer]) -> None:
    """Write the words of each token of pairs, and the links of these words, as JSON lines."""
    with replacing(path) as file:
        for chunk in chunks(pairs, CHUNK_PAIRS):
            for pair, one in zip(chunk, _cut(chunk, codecs), strict=True):
                record = {"source": one.pair.source_words, "target": one.pair.target_words, "links": pair.links}
                file.write(json.dumps(record).encode() + b"\n")


def read_aligned(path: Path, store: TokenStore) -> list[AlignedPair]:
    """Read the links that `write_aligned` wrote for the pairs of a store."""
    try:
        records = [parse_json(line.raw.decode()) for line in Lines(path)]
        found = [
            AlignedPair(
                CutPair(store.source(i).tolist(), store.target(i).tolist(), record["source"], record["target"]),
                links_of(record["links"], f"{path}:{i + 1}"),
            )
            for i, record in enumerate(records)
        ]
        fits = len(found) == len(store) and all(
            (len(one.source), len(one.target)) == (len(one.source_words), len(one.target_words)) for one, _ in found
        )
    except (DataError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}): copy it again") from None
    if not fits:
        raise RunFolderError(f"{path} does not belong to {store}: copy it again")
    return found
