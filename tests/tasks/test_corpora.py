"""Corpora of runs: no text is lost in silence, none hangs the preparation, and every command reads them alike."""

import hashlib
import json
import os
import random
import signal
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from regard.errors import DataError
from regard.tasks.language_modelling.config import LanguageModelConfig
from regard.tasks.language_modelling.corpus import open_text, prepare_text
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text import tokenizer_recipes
from regard.tasks.text.pair_store import TokenStore
from regard.tasks.text.running_text import TextStore
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE, in_background
from regard.tasks.text.tokenizers import UNK
from regard.tasks.training.interrupts import Interrupted, ending_at_once
from regard.tasks.translation.corpus import Corpus, open_corpus, prepare_corpus
from regard.tasks.translation.train import Validation, run_translation
from tests.conftest import Call, check_one_line
from tests.tasks.small_runs import PAIRS, small_config, write_pairs


def prepared(prepare: Callable[..., None], config: Any) -> tuple[RunFolder, list[str]]:
    folder, said = RunFolder(config.out), list[str]()
    folder.path.mkdir()
    prepare(config, folder, said.append)
    return folder, said


def test_a_frequent_source_does_not_fill_the_validation_set(tmp_path: Path) -> None:
    """Of 1,000 pairs 20 are held out, those of the sources with the lowest digests; 900 pairs have such a source."""
    numbers = {
        f"hello {n}": int.from_bytes(hashlib.blake2b(b"hello %d" % n, digest_size=8).digest(), "little")
        for n in range(999)
    }
    lowest, *others = sorted(numbers, key=lambda source: numbers[source])
    pairs = [(lowest, f"hallo {n}") for n in range(900)] + [(source, "hallo") for source in others[:100]]
    config = small_config(tmp_path, data=(write_pairs(tmp_path / "a.tsv", pairs),), valid=())
    folder, said = prepared(prepare_corpus, config)
    corpus = open_corpus(config, folder)
    decode = corpus.source_tokenizer.decode
    held_out = Counter(decode(corpus.valid.source(n).tolist()) for n in range(len(corpus.valid)))
    assert 0 < len(corpus.valid) < 110
    assert max(held_out.values()) <= 5
    assert said[0] == f"{1000 - len(corpus.valid)} pairs to train on, {len(corpus.valid)} held out for validation"


LONG = [("we see " * 40, "x")]


def test_validation_pairs_that_are_all_too_long_are_told_before_training(tmp_path: Path) -> None:
    config = small_config(tmp_path, valid=(write_pairs(tmp_path / "v.tsv", LONG * 4),), max_length=60)
    with pytest.raises(DataError, match=r"there is no pair for validation of at most 600 .*give others by --valid$"):
        run_translation(config)
    assert not config.out.exists()


def test_all_that_was_left_out_is_in_one_line(tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "a.tsv", PAIRS + LONG)
    valid = write_pairs(tmp_path / "v.tsv", LONG * 4 + PAIRS[:6])
    for path in (data, valid):
        with path.open("ab") as file:
            file.write(b"no tab\n\xff\ty\n")
    settings: dict[str, Any] = {"tokenizer": "characters", "max_length": 60, "bad_lines": "skip"}
    folder, said = prepared(prepare_corpus, small_config(tmp_path, data=(data,), valid=(valid,), **settings))
    assert said[0].split("; ")[:3] == [
        "51 pairs to train on, 10 for validation",
        "1 of 51 pairs are longer than --max-length or --batch-tokens allow: left out",
        "4 of 10 pairs for validation are longer than --max-length or --batch-tokens allow: left out",
    ]
    assert said[0].count("2 bad lines left out; the first: ") == 2
    assert json.loads(folder.prepared_file.read_text())["valid_pairs_left_out"] == 4


def test_an_error_after_a_step_removes_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the run can be gone on with."""

    def fail(_: Validation) -> dict[str, float]:
        raise DataError("the pairs are gone")

    config = small_config(tmp_path, steps=3, save_every=3)
    with monkeypatch.context() as patched:
        patched.setattr(Validation, "__call__", fail)
        with pytest.raises(DataError, match="the pairs are gone"):
            run_translation(config)
    assert (config.out / "metrics.jsonl").exists()
    run_translation(config, resume=True)
    assert RunFolder(config.out).checkpoints.position("last").step == 3


def text_config(folder: Path, content: str, name: str = "text.txt", **settings: Any) -> LanguageModelConfig:
    (folder / name).write_text(content, encoding="utf-8")
    return LanguageModelConfig(data=(folder / name,), out=folder / "run", block_length=16, vocab_size=300, **settings)


@pytest.mark.parametrize("last", ["", "\nThe end."])
def test_a_text_without_line_feeds_is_trained_on_and_validated(tmp_path: Path, last: str) -> None:
    content = "to be or not to be, that is the question " * 200 + last
    folder, _ = prepared(prepare_text, text_config(tmp_path, content))
    corpus = open_text(folder)
    sizes = [store.text_bytes for store in (corpus.train, corpus.valid)]
    assert sizes[1] == pytest.approx(0.1 * sum(sizes), abs=512)
    assert sum(sizes) == len(content) + 2  # a line feed at the end of either part
    assert max(map(len, (corpus.tokenizer.decode([n]) for n in range(len(corpus.tokenizer))))) < 30


def test_the_texts_of_json_lines_are_the_text(tmp_path: Path) -> None:
    records = [{"text": f"line one of {n}\nline two", "url": "https://example.org"} for n in range(100)]
    content = "".join(f"{json.dumps(one)}\n" for one in records)
    config = text_config(tmp_path, content, "text.jsonl", documents="paragraphs")
    folder, _ = prepared(prepare_text, config)
    corpus = open_text(folder)
    assert corpus.train.documents + corpus.valid.documents in (100, 101)  # one is cut
    text = corpus.tokenizer.decode(corpus.train.tokens.tolist())
    assert "line one of 7\nline two\n" in text
    assert "url" not in text


def test_the_trainer_of_bpe_is_given_no_long_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes quadratic time in the length of a word: 900,000 dashes took more than twenty minutes."""
    given: list[str] = []

    def seen(work: partial[None]) -> None:
        given.extend(work.args[0])

    monkeypatch.setattr(tokenizer_recipes, "in_background", seen)
    ruler = "-" * 10_000
    ByteLevelBPE(vocab_size=300).train([ruler, "a cat"])
    assert "".join(given) == f"{ruler}a cat"
    assert max(map(len, given)) == 512


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_work_of_a_library_at_once(number: signal.Signals) -> None:
    """Which looks at no signal itself; it goes on in a thread that ends with the process."""
    before = set(threading.enumerate())
    begun, is_told_to_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        is_told_to_end.wait(60)

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with ending_at_once(), pytest.raises((KeyboardInterrupt, Interrupted)):
        in_background(work)
    sender.join()
    (left,) = set(threading.enumerate()) - before
    assert left.daemon
    is_told_to_end.set()
    left.join()


def test_a_signal_within_a_finalizer_ends_the_work_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python swallows the error of a handler that it runs there."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    is_told_to_end, join = threading.Event(), threading.Thread.join

    def waiting(thread: threading.Thread, timeout: float | None = None) -> None:
        Finalized()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", waiting)
    with pytest.raises(KeyboardInterrupt):
        in_background(partial(is_told_to_end.wait, 5))
    is_told_to_end.set()


COMMANDS = {
    "evaluate": ("--beam", "1", "--engine", "regard", "--data"),
    "align": ("--data",),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reads_and_counts_alike(call: Call, begun_run: Path, tmp_path: Path, command: str) -> None:
    """Three columns are refused with the flag that reads them; a bad line is named, or left out and counted."""
    data = tmp_path / "pairs.tsv"
    data.write_bytes(b"we see one cats\ton y voit un chats\tattributed\nno tab\n" * 2)
    typed = (command, str(begun_run), *COMMANDS[command], str(data), "--device", "cpu")
    status, _, err = call(*typed)
    advice = "remove the others, or leave them out by --data-format tsv-extra"
    assert (status, err) == (2, f"regard: {data}:1: expected 2 columns, got 3; {advice}\n")
    status, _, err = call(*typed, "--data-format", "tsv-extra")
    assert (status, f"{data}:2: expected a source and a target" in err) == (2, True)
    status, out, err = call(*typed, "--data-format", "tsv-extra", "--bad-lines", "skip")
    assert status == 0, err
    assert err.count(f"2 bad lines left out; the first: {data}:2: ") == 1
    if command == "align":  # answer n is about line n
        assert [bool(line) for line in out.split("\n")[:-1]] == [True, False, True, False]


def test_translate_reads_json_lines(call: Call, begun_run: Path, tmp_path: Path) -> None:
    typed = ("translate", str(begun_run), "--device", "cpu", "--beam", "1", "--engine", "regard")
    plain = call(*typed, stdin=b"we see one cats\nwe see six stars\n")
    lines = b'{"source": "we see one cats"}\n{"id": 2, "text": "we see six stars"}\n'
    assert call(*typed, "--data-format", "jsonl", stdin=lines) == plain
    assert call(*typed, stdin=lines)[1] != plain[1]
    (tmp_path / "x.jsonl").write_bytes(lines)
    assert call(*typed, "--input", str(tmp_path / "x.jsonl")) == plain
    for name in ("x.json", "x"):
        (tmp_path / name).write_bytes(lines)
        assert call(*typed, "--input", str(tmp_path / name))[2].endswith(f"{name}: say its form by --data-format\n")


def test_names_and_prompts_that_are_not_utf8_are_told_in_one_line(call: Call, begun_run: Path, tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path / "caf") + b"\xe9.tsv")
    Path(name).write_text("one two\n")
    link = tmp_path / "link"
    link.symlink_to(name)
    for typed, said in {
        ("train", "--data", name, "--out", f"{tmp_path}/new"): r"--data: expected a name in UTF-8, got b'",
        ("train", "--data", str(link), "--out", name): "--out: expected a name in UTF-8",
        ("evaluate", str(begun_run), "--data", name): rf"{tmp_path}/caf\udce9.tsv:1: expected a source",
        ("translate", str(begun_run), "caf\udce9"): "sentence 1: expected UTF-8, got byte 0xe9 at byte 4",
    }.items():
        check_one_line(call(*typed, "--device", "cpu"), said)


WORDS = ["Ange", "été", "Öl", "naïve", "ça", "él", "über", "Strauß", "İzmir", "ﬁn", "Ω", "1½", "東京"]
WORDS += ["ไทย", "हिन्दी", "don't", "e-mail"]
OPTIONS = [
    (kind, lowercase, size)
    for kind in ("bpe", "words", "characters")
    for lowercase in (False, True)
    for size in (300, 30)
]


def lines(count: int, draw: random.Random) -> Iterator[str]:
    """Random lines, most of them forms of few sentences: another case, another encoding of letters, other spaces."""
    sentences = [" ".join(draw.choices(WORDS, k=draw.randint(1, 5))) for _ in range(count // 3)]
    for _ in range(count):
        text = draw.choice(sentences)
        text = unicodedata.normalize(draw.choice(["NFC", "NFD"]), text)
        text = draw.choice([text, text, text.upper(), text.lower()])
        yield draw.choice(["", " "]) + text.replace(" ", draw.choice([" ", " ", "  ", "\u00a0", "\u2003"]))


def rows(store: TokenStore) -> list[tuple[int, ...]]:
    return [tuple(store.source(number).tolist()) for number in range(len(store))]


def corpus_of(folder: Path, pairs: list[tuple[str, str]], **settings: Any) -> tuple[Corpus, list[str]]:
    folder.mkdir(exist_ok=True)
    config = small_config(folder, data=(write_pairs(folder / "a.tsv", pairs),), valid=(), **settings)
    run, said = prepared(prepare_corpus, config)
    return open_corpus(config, run), said


@pytest.mark.parametrize(("kind", "lowercase", "size"), [one for one in OPTIONS if one[0] != "bpe" or one[2] > 260])
@pytest.mark.parametrize("shared", [False, True])
def test_no_source_is_in_both_parts(tmp_path: Path, kind: str, lowercase: bool, size: int, shared: bool) -> None:
    pairs = [(line, f"n {number}") for number, line in enumerate(lines(500, random.Random(size)))]
    settings = {"tokenizer": kind, "lowercase": lowercase, "vocab_size": size, "shared_vocabulary": shared}
    corpus, _ = corpus_of(tmp_path / "first", pairs, **settings)
    valid, train = rows(corpus.valid), rows(corpus.train)
    assert not {row for row in valid if UNK not in row} & set(train)
    assert len(valid) + len(train) == len(pairs)
    assert 20 <= len(valid) < 30
    again, _ = corpus_of(tmp_path / "second", pairs, tokenizers_of=tmp_path / "first" / "run", **settings)
    assert rows(again.valid) == valid


def test_the_share_that_was_asked_is_of_the_sources_that_are_there(tmp_path: Path) -> None:
    """1,000 pairs of 101 sources: each source has as many as half of the validation pairs."""
    for sources, expected in ((101, 27), (5, 200), (2, 500)):
        pairs = [(f"source {number % sources}", f"{number}") for number in range(1_000)]
        corpus, _ = corpus_of(tmp_path / str(sources), pairs, tokenizer="words")
        assert len(corpus.valid) == expected
        assert not set(rows(corpus.valid)) & set(rows(corpus.train))


@pytest.mark.parametrize("count", [1, 40])
def test_one_source_is_too_few(tmp_path: Path, count: int) -> None:
    forms = ["It is.", "it  IS.", " it is."]
    pairs = [(forms[number % 3], f"{number}") for number in range(count)]
    with pytest.raises(DataError, match="two sources or more, of which one is kept for validation, got one source"):
        corpus_of(tmp_path, pairs, tokenizer="words", lowercase=True)


def documents(store: TextStore) -> set[tuple[int, ...]]:
    tokens = store.tokens.tolist()
    begins = [place for place, token in enumerate(tokens) if token == 1]
    return {tuple(tokens[a:b]) for a, b in zip(begins, [*begins[1:], len(tokens)], strict=True)}


@pytest.mark.parametrize("kind", ["bpe", "words", "characters"])
@pytest.mark.parametrize("unit", ["lines", "paragraphs"])
def test_no_document_is_in_both_parts(tmp_path: Path, kind: str, unit: Any) -> None:
    written = list(lines(500, random.Random(7)))
    content = ("\n" if unit == "lines" else "\n\n").join(written)
    config = text_config(tmp_path, content, documents=unit, tokenizer=kind, valid_share=0.2)
    run, said = prepared(prepare_text, config)
    corpus = open_text(run)
    assert len(documents(corpus.valid)) > 5
    assert not documents(corpus.valid) & documents(corpus.train)
    assert "documents for validation are left out: training has them too" in said[0]


def test_a_text_of_few_lines_again_and_again_has_no_document_to_hold_out(tmp_path: Path) -> None:
    config = text_config(tmp_path, "to be\nor not\n" * 100, documents="lines", tokenizer="words")
    with pytest.raises(DataError, match=r"a document for validation that training lacks, but all 20 .* --valid"):
        prepared(prepare_text, config)
