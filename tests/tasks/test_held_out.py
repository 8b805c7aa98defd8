"""What is held out for validation is not trained on, whatever the bytes of a line are."""

import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regard.errors import DataError
from regard.tasks.language_modelling.config import LanguageModelConfig
from regard.tasks.language_modelling.corpus import open_text, prepare_text
from regard.tasks.text.pair_store import TokenStore
from regard.tasks.text.running_text import TextStore
from regard.tasks.text.tokenizers import UNK
from regard.tasks.translation.corpus import Corpus, open_corpus, prepare_corpus
from tests.tasks.small_runs import small_config, write_pairs
from tests.tasks.test_corpora import prepared

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
    (tmp_path / "text.txt").write_text(("\n" if unit == "lines" else "\n\n").join(written), encoding="utf-8")
    settings: dict[str, Any] = {"documents": unit, "tokenizer": kind, "vocab_size": 300, "valid_share": 0.2}
    config = LanguageModelConfig(data=(tmp_path / "text.txt",), out=tmp_path / "run", block_length=16, **settings)
    run, said = prepared(prepare_text, config)
    corpus = open_text(run)
    assert len(documents(corpus.valid)) > 5
    assert not documents(corpus.valid) & documents(corpus.train)
    assert "documents for validation are left out: training has them too" in said[0]


def test_a_text_of_few_lines_again_and_again_has_no_document_to_hold_out(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be\nor not\n" * 100, encoding="utf-8")
    settings: dict[str, Any] = {"documents": "lines", "tokenizer": "words"}
    config = LanguageModelConfig(data=(tmp_path / "text.txt",), out=tmp_path / "run", block_length=16, **settings)
    with pytest.raises(DataError, match=r"a document for validation that training lacks, but all 20 .* --valid"):
        prepared(prepare_text, config)
