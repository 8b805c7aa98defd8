"""Translating and scoring the texts of a table: the answers of the models themselves, row by row."""

import pickle
from pathlib import Path

import pyarrow as pa
import pytest

from regard.corpus import Measure, ScoreText, Translate
from regard.errors import ArgumentError
from regard.models.config import DecoderOnlyConfig
from regard.tasks import LanguageModel, LanguageModelConfig, Translator, train_language_model, train_translation
from regard.tasks.generation.config import Beam
from regard.tasks.training.fit_config import FitConfig
from tests.tasks.small_runs import PAIRS, small_config

TEXTS = [PAIRS[0][0], None, PAIRS[1][0], "we see " * 400]


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config(tmp_path_factory.mktemp("translator"), steps=1, validate_every=1)
    train_translation(config)
    return config.out


def train_book(folder: Path, *, seed: int = 0) -> Path:
    (folder / "book.txt").write_text("a line of a book\n" * 200)
    decoder = DecoderOnlyConfig(dim=8, num_heads=2, num_layers=1, feed_forward_dim=8)
    config = LanguageModelConfig(
        data=(folder / "book.txt",), out=folder / "run", model=decoder, fit=FitConfig(steps=1), device="cpu",
        tokenizer="characters", block_length=16, pictures=0, seed=seed,
    )  # fmt: skip
    train_language_model(config, overwrite=True)
    return folder / "run"


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_book(tmp_path_factory.mktemp("book"))


def test_translations_are_those_of_the_translator(translator: Path) -> None:
    table = pa.table({"n": [1, 2, 3], "text": TEXTS[:3]})
    found = pickle.loads(pickle.dumps(Translate(translator, beam=2, device="cpu")))(table)
    assert found.column_names == ["n", "text", "translation", "error"]
    sentences = [one for one in TEXTS[:3] if one is not None]
    expected = [one.text for one in Translator.load(translator, device="cpu").translate(sentences, beam=Beam(2))]
    assert found.column("translation").to_pylist() == [expected[0], None, expected[1]]
    assert found.column("error").to_pylist() == [None, "there is no text: it is null", None]
    with pytest.raises(ArgumentError, match="is a translator, which scores pairs: name a language model"):
        ScoreText(translator, device="cpu")(table)


def test_a_run_that_was_trained_again_is_loaded_again(tmp_path: Path) -> None:
    score, table = ScoreText(tmp_path / "run", device="cpu"), pa.table({"text": ["a line"]})
    found = []
    for seed in (0, 1):
        train_book(tmp_path, seed=seed)
        found += score(table).to_pydict()["log_probability"]
        (expected,) = LanguageModel.load(tmp_path / "run", device="cpu").score(["a line"])
        assert found[-1] == expected.log_probability
    assert found[0] != found[1]


def test_scores_are_those_of_the_language_model(book: Path) -> None:
    texts = ["a line", None, "of a book, with signs", ""]
    found = ScoreText(book, device="cpu")(pa.table({"text": texts})).to_pydict()
    model = LanguageModel.load(book, device="cpu")
    for text, number, tokens in zip(texts, found["log_probability"], found["tokens"], strict=True):
        if text is None:
            assert number is tokens is None
        else:
            [expected] = model.score([text])
            assert (number, tokens) == (expected.log_probability, expected.tokens)
    assert ScoreText(book, device="cpu")(pa.table({"text": pa.array([], pa.string())})).num_rows == 0
    with pytest.raises(ArgumentError, match="is a language model: name a translator"):
        Translate(book, device="cpu")(pa.table({"text": texts}))


def test_a_run_of_a_language_model_is_measured(book: Path, translator: Path) -> None:
    rows = Measure(book, device="cpu")(pa.table({"text": ["a line", "a line of a book that is long"]})).to_pylist()
    model = LanguageModel.load(book, device="cpu")
    weights = model.attend("a line").maps["decoder.0"]
    for row in rows[:2]:
        assert row["n_tokens"] == len("a line") + 1
        assert row["entropy"] == pytest.approx(float(weights[row["head"]].entropy().mean()), abs=1e-6)
    assert rows[2]["error"] == "the text has 29 tokens; expected 1 to 15"
    with pytest.raises(ArgumentError, match="a translator of a run reads pairs"):
        Measure(translator, device="cpu")(pa.table({"text": ["a line"]}))


def test_datasets_map_the_callables(book: Path, translator: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = pa.table({"text": ["a line", "of a book", "with signs"]})
    rows = datasets.Dataset(table).with_format("arrow")
    kinds = (Measure(book, device="cpu"), ScoreText(book, device="cpu"), Translate(translator, beam=2, device="cpu"))
    for kind in kinds:
        found = rows.map(kind, batched=True, batch_size=3, remove_columns=rows.column_names)
        expected = kind(table)
        assert pa.Table.from_pylist(found.with_format(None).to_list(), schema=expected.schema).equals(expected)
