"""The text of a language model's run: each file is opened once, cut into tokens, and kept on disk in the run folder.

Where the tail for validation begins depends on how much text there is, and the tokenizer must have read all of the text
for training before it can cut the first line. So the lines go to a file without a name in the run folder
(`regard.tasks.text.spool`), and all passes but the first read that file. It is deleted once the tokens are stored.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from regard.errors import DataError, RunFolderError
from regard.tasks.language_modelling.config import TextConfig
from regard.tasks.language_modelling.likelihood import MOST_UNKNOWN
from regard.tasks.runs.prepared import check_file, read_prepared, write_prepared
from regard.tasks.runs.run import Say
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.lines import Reader, read_lines
from regard.tasks.text.running_text import TextStore, pieces
from regard.tasks.text.spool import Spool
from regard.tasks.text.tokenizer_recipes import recipe
from regard.tasks.text.tokenizers import Tokenizer

MOST_VALID_BYTES = 10_000_000
"""The most text split off for validation: enough for three digits of the loss."""
MOST_TOKENIZER_LINES = 4_000_000
"""The most lines, evenly spread, that a tokenizer learns from: its trainer keeps every word it has met."""


class TextCorpus(NamedTuple):
    """The tokenizer of a run, and its text as tokens."""

    tokenizer: Tokenizer
    train: TextStore
    valid: TextStore


def prepare_text(config: TextConfig, folder: RunFolder, say: Say) -> None:
    """Read the text, train the tokenizer, and store the tokens. A run does this once.

    Each file is opened once, so that it may be a pipe (`/dev/stdin`).

    Raises:
        DataError: a line or file cannot be read, or there is too little text.
        OSError: the disk is full.
    """
    folder.data.mkdir(exist_ok=True)
    reader = _Lines(config.data, config)
    with Spool(reader, folder.data) as lines:
        if reader.skipped:
            say(f"{reader.skipped:,} bad lines left out; the first: {reader.first_skipped}")
        if not lines:
            raise DataError(f"{_names(config)}: expected text, got nothing; name a file that has some")
        parts = _parts(config, lines, reader.size_bytes)
        if config.tokenizers_from is not None:
            tokenizer = load_tokenizer(RunFolder(config.tokenizers_from))
        else:
            learnt_from = islice(parts["train"](), None, None, -(-len(lines) // MOST_TOKENIZER_LINES))
            tokenizer = recipe(config.tokenizer, config.vocab_size).train(line + "\n" for line in learnt_from)
        tokenizer.save(folder.path / "tokenizer.json")
        stores = {name: _store(config, folder, name, lines_of(), tokenizer) for name, lines_of in parts.items()}
    for name, store in stores.items():
        unknown = f", {store.unknown:,} of them unknown ({store.unknown / len(store):.1%})" if store.unknown else ""
        say(f"{name}: {store.text_bytes:,} bytes, {len(store):,} tokens{unknown}")
    if stores["valid"].unknown > MOST_UNKNOWN * len(stores["valid"]):
        say(f"no bits per byte: more than {MOST_UNKNOWN:.0%} of the tokens of the validation text are unknown")
    say(f"vocabulary of {len(tokenizer):,} tokens")
    counts = {f"{name}_bytes": store.text_bytes for name, store in stores.items()}
    write_prepared(folder, {**counts, "fingerprint": tokenizer.fingerprint()})


def open_text(folder: RunFolder) -> TextCorpus:
    """Open the tokenizer and the tokens that `prepare_text` stored.

    Raises:
        RunFolderError: a part is absent, cut short, or belongs to another run.
    """
    tokenizer = load_tokenizer(folder)
    train, valid = (TextStore.open(folder.data / f"{part}.tokens", tokenizer) for part in ("train", "valid"))
    return TextCorpus(tokenizer, train, valid)


def load_tokenizer(folder: RunFolder) -> Tokenizer:
    """Read the tokenizer of a run.

    Raises:
        RunFolderError: it is absent, cut short, or belongs to another run.
    """
    prepared, path = read_prepared(folder), folder.path / "tokenizer.json"
    check_file(path, folder, prepared)
    tokenizer = Tokenizer.load(path)
    if tokenizer.fingerprint() != prepared.get("fingerprint"):
        raise RunFolderError(f"{path} is not the tokenizer that {folder.path} was trained with")
    return tokenizer


class _Lines(Iterator[str]):
    """The lines of several files, with the bytes of text read so far and the number of bad lines skipped."""

    def __init__(self, paths: tuple[Path, ...], config: TextConfig) -> None:
        self._readers: list[Reader[str]] = [read_lines(path, bad_lines=config.bad_lines) for path in paths]
        self._lines = (line for reader in self._readers for line in reader)
        self.size_bytes = 0

    def __next__(self) -> str:
        line = next(self._lines)
        self.size_bytes += _size(line)
        return line

    @property
    def skipped(self) -> int:
        return sum(reader.skipped for reader in self._readers)

    @property
    def first_skipped(self) -> str | None:
        return next((reader.first_skipped for reader in self._readers if reader.skipped), None)


def _parts(config: TextConfig, lines: Spool, total: int) -> dict[str, Callable[[], Iterator[str]]]:
    """How to read the lines for training, and those for validation: the tail of the `total` bytes, or other files."""
    if config.valid:
        return {"train": lambda: iter(lines), "valid": lambda: _Lines(config.valid, config)}
    cut = total - min(round(config.valid_share * total), MOST_VALID_BYTES)
    return {"train": lambda: _before(cut, lines), "valid": lambda: _after(cut, lines)}


def _before(cut: int, lines: Iterable[str]) -> Iterator[str]:
    """The lines that begin before byte `cut` of the text."""
    read = 0
    for line in lines:
        if read >= cut:
            return
        yield line
        read += _size(line)


def _after(cut: int, lines: Iterable[str]) -> Iterator[str]:
    """The lines that begin at byte `cut` or after it."""
    read = 0
    for line in lines:
        if read >= cut:
            yield line
        read += _size(line)


def _size(line: str) -> int:
    """Bytes of a line in UTF-8, its line feed counted."""
    return len(line.encode()) + 1


def _store(config: TextConfig, folder: RunFolder, name: str, lines: Iterator[str], tokenizer: Tokenizer) -> TextStore:
    path = folder.data / f"{name}.tokens"
    whole = config.documents != "file"
    store = TextStore.build(path, pieces(lines, config.documents), tokenizer, is_whole=whole)
    needed = config.block_length + 1 if name == "train" else 2
    if len(store) < needed:
        purpose = {"train": "to train on", "valid": "for validation"}[name]
        raise DataError(
            f"{_names(config)}: too little text {purpose}: expected {needed} tokens or more, got {len(store)}; "
            "give more text (also with --valid) or lower --block-length"
        )
    return store


def _names(config: TextConfig) -> str:
    return ", ".join(map(str, config.data))
