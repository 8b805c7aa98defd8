"""The text of a translation run: each file is opened once, cut into tokens, and kept on disk in the run folder.

Which pairs are held out depends on how many pairs there are, and the tokenizers must have read all of the text before
they can cut the first sentence. So the pairs go to a file without a name in the run folder
(`regard.tasks.text.spool`), and all passes but the first read that file. It is deleted once the tokens are stored.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.errors import DataError
from regard.files.atomic import replacing
from regard.tasks.runs.run import Say
from regard.tasks.runs.run_folder import RunFolder, load_tokenizer, write_prepared
from regard.tasks.text.batches import Batch, Indices, collate, plan_batches, sections
from regard.tasks.text.held_out import held_out_sources
from regard.tasks.text.lines import Reader
from regard.tasks.text.pair_store import TokenStore
from regard.tasks.text.pairs import Pair, read_pairs
from regard.tasks.text.spool import Spool
from regard.tasks.text.tokenizer_recipes import recipe
from regard.tasks.text.tokenizers import Tokenizer, read_as
from regard.tasks.training.losses import BatchSize
from regard.tasks.training.metrics import BleuCounts, bleu_caution
from regard.tasks.translation.config import TranslationConfig

TEXTS = "valid.jsonl"
MOST_TOKENIZER_PAIRS = 2_000_000
"""The most pairs, evenly spread, that tokenizers learn from: their trainers keep every word they have met."""


class Corpus(NamedTuple):
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    train: TokenStore
    valid: TokenStore
    valid_texts: Sequence[Pair]
    """The pairs for validation as they were read: texts that tokens give back lack the unknown words."""


def prepare_corpus(config: TranslationConfig, folder: RunFolder, say: Say) -> None:
    """Read the pairs, train the tokenizers, store the tokens, once a run; each file may be a pipe (`/dev/stdin`)."""
    folder.data.mkdir(exist_ok=True)
    how: dict[str, Any] = {"format": config.data_format, "bad_lines": config.bad_lines}
    read, *given = (read_pairs(paths, **how) for paths in (config.data, config.valid) if paths)
    with Spool(read, folder.data) as pairs:
        is_held_out = (lambda _source: False) if config.valid else _held_out(config, pairs)
        of_training = partial(_those, pairs, is_held_out, wanted=False)
        tokenizers = _train_tokenizers(config, folder, of_training, len(pairs))
        train = _store(folder, "train", of_training(), tokenizers, config)
        held_out = given[0] if given else _those(pairs, is_held_out, wanted=True)
        with Spool(held_out, folder.data) as held:
            valid = _store(folder, "valid", map(Pair._make, held), tokenizers, config)
            with replacing(folder.data / TEXTS) as file:
                for source, target in held:
                    record = {"source": source, "target": target}
                    file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            _say_of_figures(config, [pair[1] for pair in held], valid, tokenizers[1], say)
    too_long = [_too_long(config, part, store) for part, store in (("train", train), ("valid", valid))]
    told = [f"{len(train):,} pairs to train on, {len(valid):,} {'' if config.valid else 'held out '}for validation"]
    told += [
        f"{count:,} of {len(store):,} {name} are longer than --max-length or --batch-tokens allow: left out"
        for count, store, name in zip(too_long, (train, valid), ("pairs", "pairs for validation"), strict=True)
        if count
    ]
    say("; ".join([*told, *(line for reader in (read, *given) for line in reader.told)]))
    say(f"vocabularies of {len(tokenizers[0]):,} and {len(tokenizers[1]):,} tokens")
    write_prepared(
        folder,
        {
            "train_pairs": len(train),
            "valid_pairs": len(valid),
            "pairs_left_out": too_long[0],
            "valid_pairs_left_out": too_long[1],
            "source_fingerprint": tokenizers[0].fingerprint(),
            "target_fingerprint": tokenizers[1].fingerprint(),
        },
    )


def _too_long(config: TranslationConfig, part: str, store: TokenStore) -> int:
    """The number of pairs that are longer than the settings allow; raises DataError if all are."""
    limits: dict[str, Any] = {"max_length": config.max_length, "max_tokens": config.batch_tokens}
    if fitting := len(TokenBatches(store, seed=0, **limits)):
        return len(store) - fitting
    of_part, others = {"train": ("", ""), "valid": (" for validation", ", or give others by --valid")}[part]
    raise DataError(
        f"there is no pair{of_part} of at most {config.batch_tokens} tokens (--batch-tokens), with at most "
        f"{config.max_length} on either side (--max-length): raise them{others}"
    )


def open_corpus(config: TranslationConfig, folder: RunFolder) -> Corpus:
    tokenizers = load_tokenizers(config, folder)
    train, valid = (TokenStore.open(folder.data / part, *tokenizers) for part in ("train", "valid"))
    return Corpus(*tokenizers, train, valid, list(held_out_pairs(folder)))


def held_out_pairs(folder: RunFolder) -> Reader[Pair]:
    return read_pairs(folder.data / TEXTS, format="jsonl")


def load_tokenizers(config: TranslationConfig, folder: RunFolder) -> tuple[Tokenizer, Tokenizer]:
    files = zip(_tokenizer_files(config, folder), ("source", "target"), strict=True)
    source, target = (load_tokenizer(folder, path.name, f"{side}_fingerprint") for path, side in files)
    return source, target


def _say_of_figures(
    config: TranslationConfig, targets: Sequence[str], valid: TokenStore, tokenizer: Tokenizer, say: Say
) -> None:
    unknown = sum(int((valid.target(i) == tokenizer.unknown_id).sum()) for i in range(len(valid)))
    if unknown and tokenizer.unknown_id is not None:
        share = unknown / int(valid.target_lengths.sum())
        say(f"{share:.1%} of the tokens of the validation targets are unknown: the loss counts them as one word")
    if config.best_by == "bleu":
        counts = BleuCounts(targets, lowercase=tokenizer.lowercases, tokenize=config.bleu_tokenize)
        say(f"BLEU of the validation pairs: {counts.signature}")
        if caution := bleu_caution(targets, config.bleu_tokenize):
            say(caution)


def _store(
    folder: RunFolder,
    part: str,
    pairs: Iterator[Pair],
    tokenizers: tuple[Tokenizer, Tokenizer],
    config: TranslationConfig,
) -> TokenStore:
    first = next(pairs, None)
    if first is None:
        names = ", ".join(map(str, config.data))
        raise DataError(
            f"{names}: expected pairs of two sources or more, of which one is kept for validation, got one source as "
            "the tokenizer reads them; give pairs for validation by --valid"
        )
    return TokenStore.build(
        folder.data / part,
        chain([first], pairs),
        source_tokenizer=tokenizers[0],
        target_tokenizer=tokenizers[1],
    )


def _those(pairs: Spool, is_held_out: Callable[[str], bool], *, wanted: bool) -> Iterator[Pair]:
    return (pair for pair in map(Pair._make, pairs) if is_held_out(pair.source) == wanted)


def _held_out(config: TranslationConfig, pairs: Spool) -> Callable[[str], bool]:
    if config.tokenizers_from is None:
        normalizer = recipe(config.tokenizer, config.vocab_size, lowercase=config.lowercase).normalizer()
    else:
        normalizer = load_tokenizers(config, RunFolder(config.tokenizers_from))[0].normalizer()
    return held_out_sources((pair[0] for pair in pairs), len(pairs), read_as(normalizer))


def _train_tokenizers(
    config: TranslationConfig, folder: RunFolder, of_training: Callable[[], Iterator[Pair]], count: int
) -> tuple[Tokenizer, Tokenizer]:
    recipe_ = recipe(config.tokenizer, config.vocab_size, lowercase=config.lowercase)
    every = -(-count // MOST_TOKENIZER_PAIRS)

    def pairs() -> Iterator[Pair]:
        return islice(of_training(), None, None, every)

    if config.tokenizers_from is not None:
        source, target = load_tokenizers(config, RunFolder(config.tokenizers_from))
    elif config.shared_vocabulary:
        source = target = recipe_.train(text for pair in pairs() for text in (pair.source, pair.target))
    else:
        source = recipe_.train(pair.source for pair in pairs())
        target = recipe_.train(pair.target for pair in pairs())
    for tokenizer, path in zip((source, target), _tokenizer_files(config, folder), strict=True):
        tokenizer.save(path)
    return source, target


def _tokenizer_files(config: TranslationConfig, folder: RunFolder) -> tuple[Path, Path]:
    names = ("tokenizer.json",) * 2 if config.shared_vocabulary else ("source_tokenizer.json", "target_tokenizer.json")
    return folder.path / names[0], folder.path / names[1]


class TokenBatches:
    """The batches of a store for the training loop, without the pairs that exceed a limit (end marks counted)."""

    def __init__(
        self,
        store: TokenStore,
        *,
        max_length: int,
        max_tokens: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._store, self._max_length, self._seed = store, max_length, seed
        self._plan: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, "rank": rank, "world_size": world_size}

    def __len__(self) -> int:
        return sum(len(self._fitting(rows)) for rows in sections(len(self._store), seed=0, epoch=0))

    def count(self) -> int:
        return sum(len(plan) for _, plan in self._plans(epoch=0))

    def epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        for rows, plan in self._plans(epoch):
            for chosen in plan[start:]:
                yield self._batch(rows[chosen])
            start = max(start - len(plan), 0)

    def size(self, batch: Batch) -> BatchSize:
        return BatchSize(batch.tokens, batch.padded_tokens)

    def _plans(self, epoch: int) -> Iterator[tuple[Indices, list[Indices]]]:
        for number, rows in enumerate(sections(len(self._store), seed=self._seed, epoch=epoch)):
            fitting = self._fitting(rows)
            if len(fitting):
                lengths = self._store.lengths(fitting)
                yield fitting, plan_batches(*lengths, epoch=epoch, section=number, **self._plan)

    def _batch(self, rows: Indices) -> Batch:
        return collate([self._store.source(i) for i in rows], [self._store.target(i) for i in rows])

    def _fitting(self, rows: Indices) -> Indices:
        source, target = self._store.lengths(rows)
        longest = np.maximum(source, target) + 1 <= self._max_length
        return rows[longest & (source + target + 2 <= self._plan["max_tokens"])]
