"""The token store: its input comes out, from files that are whole and fit the tokenizers."""

import os
import pickle
import re
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import ArgumentError, DataError, RunFolderError
from regard.tasks.text import pair_store as store_module
from regard.tasks.text import spool as spool_module
from regard.tasks.text.pair_store import TokenStore
from regard.tasks.text.running_text import TextStore, pieces
from regard.tasks.text.spool import Spool
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE, Characters
from regard.tasks.text.tokenizers import BOS, EOS

SOURCE, TARGET = ByteLevelBPE(vocab_size=300).train(["the cat"]), Characters().train(["die Katze"])
PAIRS = [("the cat", "die Katze"), ("", "K"), ("日本", "?" * 300), ("the", "")]


def built(path: Path) -> TokenStore:
    return TokenStore.build(path, PAIRS, SOURCE, TARGET)


@settings(max_examples=20)
@given(pairs=st.lists(st.tuples(st.text(), st.text())), chunk=st.integers(1, 5))
def test_what_goes_in_comes_out(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], chunk: int
) -> None:
    path = tmp_path_factory.mktemp("store") / "tokens"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "CHUNK_PAIRS", chunk)
        store = TokenStore.build(path, iter(pairs), SOURCE, TARGET)
    assert len(store) == len(pairs)
    assert [store.source(i).tolist() for i in range(len(store))] == [SOURCE.encode(source) for source, _ in pairs]
    assert [store.target(i).tolist() for i in range(len(store))] == [TARGET.encode(target) for _, target in pairs]
    assert store.source_lengths.tolist() == [len(SOURCE.encode(source)) for source, _ in pairs]
    assert store.target_lengths.tolist() == [len(TARGET.encode(target)) for _, target in pairs]


def test_a_file_is_opened_again_and_travels_to_other_processes(tmp_path: Path) -> None:
    made = built(tmp_path / "tokens")
    for store in (TokenStore.open(tmp_path / "tokens", SOURCE, TARGET), pickle.loads(pickle.dumps(made))):
        assert [store.target(i).tolist() for i in range(4)] == [made.target(i).tolist() for i in range(4)]
    assert len(pickle.dumps(made)) < 1000


def test_tokens_are_mapped_read_only_and_small(tmp_path: Path) -> None:
    tokens = built(tmp_path / "tokens").source(0)
    assert tokens.dtype == np.uint16
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


@pytest.mark.parametrize(("size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.int32)])
def test_16_bits_hold_65536_tokens_and_no_more(tmp_path: Path, size: int, dtype: Any) -> None:
    letters = [chr(n) for n in (*range(0x20000, 0x2F800), *range(0x4E00, 0x9F00))][: size - 4]
    tokenizer = Characters(vocab_size=2**17).train(letters)
    assert len(tokenizer) == size
    last = next(letter for letter in letters if tokenizer.encode(letter) == [size - 1])
    store = TokenStore.build(tmp_path / "pairs", [("K", last)], TARGET, tokenizer)
    assert (store.target(0).dtype, store.target(0).tolist()) == (dtype, [size - 1])
    text = TextStore.build(tmp_path / "text", pieces([last], "lines"), tokenizer, is_whole=True)
    assert (text.tokens.dtype, text.tokens.tolist()) == (dtype, [BOS, size - 1, EOS])


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    built(tmp_path / "tokens")
    other = ByteLevelBPE(vocab_size=300).train(["a dog a dog"])
    for tokenizers in ((other, TARGET), (SOURCE, other), (TARGET, SOURCE)):
        with pytest.raises(RunFolderError, match="made with other tokenizers"):
            TokenStore.open(tmp_path / "tokens", *tokenizers)


def test_absent_foreign_and_cut_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    with pytest.raises(RunFolderError, match="no such folder"):
        TokenStore.open(path, SOURCE, TARGET)
    built(path)
    for name in ("tokens.npy", "starts.npy"):
        content = (path / name).read_bytes()
        shape, kind = content[:128].index(b"(") + 1, content[:128].index(b"<") + 1
        named = content[:shape] + b"8" + content[shape + 1 :]
        damaged = [
            b"",
            b"x" * 1000,
            content[:-1],
            content[: len(content) // 2],
            content[8:],
            content[:kind] + b"f8" + content[kind + 2 :],
            content[: kind - 1] + b"|O" + content[kind + 2 :],
            named if name == "starts.npy" else content[:100],
        ]
        for damage in damaged:
            (path / name).write_bytes(damage)
            with pytest.raises(RunFolderError, match="delete it to have it made again"):
                TokenStore.open(path, SOURCE, TARGET)
        (path / name).write_bytes(content)
    assert len(TokenStore.open(path, SOURCE, TARGET)) == len(PAIRS)


def test_an_interrupted_build_leaves_the_older_file(tmp_path: Path) -> None:
    built(tmp_path / "tokens")

    def broken() -> Iterator[tuple[str, str]]:
        yield PAIRS[0]
        raise DataError("x:2: bad")

    with pytest.raises(DataError, match="x:2"):
        TokenStore.build(tmp_path / "tokens", broken(), SOURCE, TARGET)
    assert len(TokenStore.open(tmp_path / "tokens", SOURCE, TARGET)) == len(PAIRS)
    assert {path.name for path in (tmp_path / "tokens").iterdir()} == {"tokens.npy", "starts.npy", "about.json"}


@pytest.mark.parametrize("index", [-1, 4])
def test_pairs_that_are_not_there_are_refused(tmp_path: Path, index: int) -> None:
    store = built(tmp_path / "tokens")
    for side in (store.source, store.target):
        with pytest.raises(ArgumentError, match=f"0 to 3, got {index}"):
            side(index)


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_building_takes_as_much_memory_for_a_large_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing grows, neither a single write nor the memory of the opened store."""
    monkeypatch.setattr(store_module, "CHUNK_PAIRS", 100)

    def build(count: int) -> None:
        TokenStore.build(tmp_path / "tokens", (("die Katze", "die Katze") for _ in range(count)), TARGET, TARGET)

    small, large = (peak_bytes(partial(build, count)) for count in (6_000, 25_000))
    assert large - small < 10_000


TEXTS = st.lists(st.text() | st.lists(st.text(), min_size=2, max_size=2))


@settings(max_examples=50)
@given(records=TEXTS, block=st.integers(0, 30))
def test_what_goes_in_comes_out_again_and_again(
    tmp_path_factory: pytest.TempPathFactory, records: list[str | list[str]], block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool_module, "BLOCK_CHARACTERS", block)
        with Spool(iter(records), tmp_path_factory.getbasetemp()) as spool:
            assert len(spool) == len(records)
            assert list(spool) == records
            assert list(zip(spool, spool, strict=True)) == list(zip(records, records, strict=True))


@pytest.mark.skipif(os.name == "nt", reason="Windows shows open files in their folder, and does not list them")
def test_it_leaves_nothing_and_shows_nothing(tmp_path: Path) -> None:
    with Spool(["a"], tmp_path) as spool:
        assert list(tmp_path.iterdir()) == []  # a kill would leave nothing either
        assert list(spool) == ["a"]
    descriptors = len(os.listdir("/dev/fd"))

    def broken() -> Iterator[str]:
        yield "a"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Spool(broken(), tmp_path)
    assert len(os.listdir("/dev/fd")) == descriptors


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, _content: bytes) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Full())
    with pytest.raises(OSError, match=re.escape(f"No space left on device: {str(tmp_path)!r}")):
        Spool(["a"], tmp_path)


def test_memory_does_not_grow_with_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "BLOCK_CHARACTERS", 30_000)

    def fill(count: int) -> None:
        with Spool((("die Katze" * 20, "the cat" * 20) for _ in range(count)), tmp_path) as spool:
            assert sum(1 for _ in spool) == count

    small, large = (peak_bytes(partial(fill, count)) for count in (2_000, 10_000))
    assert large - small < 10_000
