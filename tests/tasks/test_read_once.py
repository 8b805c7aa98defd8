"""Corpora are read once: a file may be a pipe."""

import gzip
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from regard.errors import ArgumentError
from regard.tasks import train_translation
from regard.tasks.language_modelling import corpus as text_corpus
from regard.tasks.language_modelling.config import LanguageModelConfig
from regard.tasks.language_modelling.corpus import prepare_text
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.pair_store import TokenStore
from regard.tasks.text.pairs import read_pairs
from regard.tasks.text.running_text import TextStore, pieces
from regard.tasks.text.tokenizer_recipes import recipe
from regard.tasks.translation import corpus as translation_corpus
from regard.tasks.translation.corpus import prepare_corpus
from tests.conftest import Call
from tests.tasks.small_runs import PAIRS, small_config, write_pairs

MANY = [(f"{source} {n}", f"{target} {n}") for n in range(8) for source, target in PAIRS]


ENDINGS = {"pairs": ".tsv", "text": ".txt"}


def prepare(kind: str, out: Path, **settings: Any) -> dict[str, str]:
    folder = RunFolder(out)
    said: list[str] = []
    folder.path.mkdir()
    if kind == "pairs":
        prepare_corpus(small_config(out.parent, out=out, **{"valid": ()} | settings), folder, said.append)
    else:
        prepare_text(LanguageModelConfig(out=out, vocab_size=280, block_length=16, **settings), folder, said.append)
    assert said
    return {str(path.relative_to(out)): digest(path) for path in sorted(out.rglob("*")) if path.is_file()}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_vocabulary_of_no_size_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "bad.tsv").write_text("a line without a tab, which is told as it is read\n")
    config = small_config(tmp_path, data=(tmp_path / "bad.tsv",), vocab_size=5)
    with pytest.raises(ArgumentError, match="must be at least 260, got 5"):
        train_translation(config)
    assert not config.out.exists()


@contextmanager
def fed(pipe: Path, content: bytes) -> Iterator[None]:
    os.mkfifo(pipe)
    is_over = threading.Event()

    def feed() -> None:
        pipe.write_bytes(content)
        while not is_over.wait(0.01):
            with suppress(OSError):  # no process reads
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))

    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("kind", ["pairs", "text"])
@pytest.mark.parametrize("has_valid", [True, False])
def test_pipes_give_what_files_give(tmp_path: Path, kind: str, has_valid: bool) -> None:
    """A pipe that is opened once more has nothing in it."""
    end, folders = ENDINGS[kind], (tmp_path / "read", tmp_path / "piped")
    many, few = (write_pairs(tmp_path / "x", pairs).read_bytes() for pairs in (MANY, PAIRS))
    contents = {f"a{end}": many, f"b{end}.gz": gzip.compress(many)} | ({f"v{end}": few} if has_valid else {})
    found = []
    with ExitStack() as pipes:
        for folder in folders:
            folder.mkdir()
            for name, content in contents.items():
                if folder is folders[0]:
                    (folder / name).write_bytes(content)
                else:
                    pipes.enter_context(fed(folder / name, content))
            paths = [folder / name for name in contents]
            found.append(prepare(kind, folder / "run", data=tuple(paths[:2]), valid=tuple(paths[2:])))
    assert found[0] == found[1]


def test_pairs_are_what_the_whole_list_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation_corpus, "MOST_TOKENIZER_PAIRS", 150)  # every third
    data = write_pairs(tmp_path / "a.tsv", MANY)
    found = prepare("pairs", tmp_path / "run", data=(data,))
    every = list(read_pairs(data))
    lowest = sorted({pair.source for pair in every}, key=number_of)[:20]
    held_out = [pair.source in lowest for pair in every]
    train = [pair for pair, is_held in zip(every, held_out, strict=True) if not is_held]
    tokenizers = [recipe("bpe", 300).train(pair[side] for pair in train[::3]) for side in (0, 1)]
    for name, tokenizer in zip(("source", "target"), tokenizers, strict=True):
        tokenizer.save(tmp_path / f"{name}_tokenizer.json")
        assert digest(tmp_path / f"{name}_tokenizer.json") == found[f"{name}_tokenizer.json"]
    valid = [pair for pair, is_held in zip(every, held_out, strict=True) if is_held]
    assert len(valid) == 20
    for name, pairs in (("train", train), ("valid", valid)):
        TokenStore.build(tmp_path / name, pairs, *tokenizers)
        for path in (tmp_path / name).iterdir():
            assert digest(path) == found[f"data/{name}/{path.name}"]


def test_every_seed_holds_out_the_same_pairs(tmp_path: Path) -> None:
    """So runs of several seeds can be compared, and translate together: their tokenizers are the same."""
    data = write_pairs(tmp_path / "a.tsv", MANY)
    first, second = (prepare("pairs", tmp_path / f"run-{seed}", data=(data,), seed=seed) for seed in (0, 7))
    assert first == second
    assert {"data/valid/tokens.npy", "source_tokenizer.json"} <= set(first)


def number_of(source: str) -> int:
    return int.from_bytes(hashlib.blake2b(source.encode(), digest_size=8).digest(), "little")


def test_lines_are_what_the_whole_list_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_corpus, "MOST_TOKENIZER_LINES", 150)  # every third
    data = write_pairs(tmp_path / "a.txt", MANY)
    found = prepare("text", tmp_path / "run", data=(data,))
    lines = data.read_text(encoding="utf-8").splitlines()
    begins = [0, *accumulate(len(line.encode()) + 1 for line in lines)]
    cut = begins[-1] - round(LanguageModelConfig(data=(data,), out=tmp_path).valid_share * begins[-1])
    first_held_out = next(n for n, begin in enumerate(begins) if begin >= cut)
    assert 300 < first_held_out < 400
    tokenizer = recipe("bpe", 280).train(f"{line}\n" for line in lines[:first_held_out:3])
    tokenizer.save(tmp_path / "tokenizer.json")
    assert digest(tmp_path / "tokenizer.json") == found["tokenizer.json"]
    for name, part in (("train", lines[:first_held_out]), ("valid", lines[first_held_out:])):
        TextStore.build(tmp_path / name, pieces(part, "file"), tokenizer, is_whole=False)
        for path in (tmp_path / name).iterdir():
            assert digest(path) == found[f"data/{name}/{path.name}"]


def test_evaluate_reads_pairs_once(run_of_words: Path, call: Call) -> None:
    data = write_pairs(run_of_words.parent / "judged.tsv", PAIRS[:3])
    command = ("evaluate", str(run_of_words), "--device", "cpu", "--data")
    status, out, _ = call(*command, str(data))
    with fed(run_of_words.parent / "pipe.tsv", data.read_bytes()):
        assert call(*command, str(run_of_words.parent / "pipe.tsv"))[:2] == (status, out) == (0, out)
