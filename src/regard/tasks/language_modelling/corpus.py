"""The text of a language model's run: each file is opened once, cut into tokens, and kept on disk in the run folder.

Where the tail for validation begins depends on how much text there is, and the tokenizer must have read all of the text
for training before it can cut the first line. So the lines go to a file without a name in the run folder
(`regard.tasks.text.spool`), and all passes but the first read that file. It is deleted once the tokens are stored.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from regard.errors import DataError
from regard.tasks.language_modelling.config import LanguageModelConfig
from regard.tasks.language_modelling.likelihood import MOST_UNKNOWN
from regard.tasks.runs.run import Say
from regard.tasks.runs.run_folder import RunFolder, load_tokenizer, write_prepared
from regard.tasks.text.forms import RunningText
from regard.tasks.text.held_out import seen_documents, without
from regard.tasks.text.running_text import TextPiece, TextStore, pieces
from regard.tasks.text.spool import Spool
from regard.tasks.text.tokenizer_recipes import recipe
from regard.tasks.text.tokenizers import Tokenizer
from regard.tasks.text.unicode import bounded

MOST_VALID_BYTES = 10_000_000
"""The most text split off for validation: enough for three digits of the loss."""
MOST_TOKENIZER_LINES = 4_000_000
"""The most lines, evenly spread, that a tokenizer learns from: its trainer keeps every word it has met."""


class TextCorpus(NamedTuple):
    tokenizer: Tokenizer
    train: TextStore
    valid: TextStore


def prepare_text(config: LanguageModelConfig, folder: RunFolder, say: Say) -> None:
    """Read the text, train the tokenizer, and store the tokens. A run does this once.

    Each file is opened once, so that it may be a pipe (`/dev/stdin`).
    """
    folder.data.mkdir(exist_ok=True)
    read, *held_out = (_text(paths, config) for paths in (config.data, config.valid) if paths)
    with Spool(read, folder.data) as lines:
        if not lines:
            raise DataError(f"{_names(config)}: expected text, got nothing; name a file that has some")
        tail_bytes = 0 if config.valid else min(round(config.valid_share * read.size_bytes), MOST_VALID_BYTES)
        end = read.size_bytes - tail_bytes
        if config.tokenizers_from is not None:
            tokenizer = load_tokenizer(RunFolder(config.tokenizers_from))
        else:
            learnt_from = islice(_between(0, end, lines), None, None, -(-len(lines) // MOST_TOKENIZER_LINES))
            tokenizer = recipe(config.tokenizer, config.vocab_size).train(line + "\n" for line in learnt_from)
        tokenizer.save(folder.path / "tokenizer.json")
        train = _store(config, folder, "train", pieces(_between(0, end, lines), config.documents), tokenizer)
        if held_out:
            valid = _store(config, folder, "valid", pieces(chain.from_iterable(held_out), config.documents), tokenizer)
        else:

            def tail() -> Iterator[TextPiece]:
                return pieces(_between(end, read.size_bytes, lines), config.documents)

            valid = _store(config, folder, "valid", tail(), tokenizer)
            if seen := seen_documents(valid, train):
                count = valid.documents
                if len(seen) == count:
                    raise DataError(
                        f"{_names(config)}: expected a document for validation that training lacks, but all {count:,} "
                        "of the last ones are in training too; give others by --valid"
                    )
                say(f"{len(seen):,} of {count:,} documents for validation are left out: training has them too")
                valid = _store(config, folder, "valid", without(tail(), seen), tokenizer)
    for name, store in (("train", train), ("valid", valid)):
        unknown = f", {store.unknown:,} of them unknown ({store.unknown / len(store):.1%})" if store.unknown else ""
        say(f"{name}: {store.text_bytes:,} bytes, {len(store):,} tokens{unknown}")
    if valid.unknown > MOST_UNKNOWN * len(valid):
        say(f"no bits per byte: more than {MOST_UNKNOWN:.0%} of the tokens of the validation text are unknown")
    if told := [line for one in (read, *held_out) for line in one.told]:
        say("; ".join(told))
    say(f"vocabulary of {len(tokenizer):,} tokens")
    counts = {"train_bytes": train.text_bytes, "valid_bytes": valid.text_bytes}
    write_prepared(folder, {**counts, "fingerprint": tokenizer.fingerprint()})


def open_text(folder: RunFolder) -> TextCorpus:
    tokenizer = load_tokenizer(folder)
    train, valid = (TextStore.open(folder.data / part, tokenizer) for part in ("train", "valid"))
    return TextCorpus(tokenizer, train, valid)


def _text(paths: tuple[Path, ...], config: LanguageModelConfig) -> RunningText:
    return RunningText(paths, format=config.data_format, bad_lines=config.bad_lines)


def _between(begin: int, end: int, lines: Iterable[str]) -> Iterator[str]:
    """The lines that begin from one byte of the text up to another; of a long line, its parts that do."""
    at = 0
    for line in lines:
        parts = []
        for part in bounded(line):
            if begin <= at < end:
                parts.append(part)
            at += len(part.encode())
        at += 1  # its line feed
        if parts:
            yield "".join(parts)
        elif at > end:
            return


def _store(
    config: LanguageModelConfig, folder: RunFolder, name: str, text: Iterator[TextPiece], tokenizer: Tokenizer
) -> TextStore:
    store = TextStore.build(folder.data / name, text, tokenizer, is_whole=config.documents != "file")
    needed = config.block_length + 1 if name == "train" else 2
    if len(store) < needed:
        purpose = {"train": "to train on", "valid": "for validation"}[name]
        raise DataError(
            f"{_names(config)}: too little text {purpose}: expected {needed} tokens or more, got {len(store)}; "
            "give more text (also with --valid) or lower --block-length"
        )
    return store


def _names(config: LanguageModelConfig) -> str:
    return ", ".join(map(str, config.data))
