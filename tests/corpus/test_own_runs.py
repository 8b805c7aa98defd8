"""Measuring runs of `regard train`: the statistics are those of the run's own model, as its folder has it."""

from pathlib import Path

import pyarrow as pa
import pytest

from regard.corpus import Measure
from regard.errors import ArgumentError
from regard.models.config import DecoderOnlyConfig
from regard.tasks import LanguageModel, LanguageModelConfig, train_language_model, train_translation
from regard.tasks.training.fit_config import FitConfig
from tests.tasks.small_runs import small_config


def train_book(folder: Path, *, seed: int = 0) -> Path:
    (folder / "book.txt").write_text("a line of a book\n" * 200)
    decoder = DecoderOnlyConfig(dim=8, num_heads=2, num_layers=1, feed_forward_dim=8)
    config = LanguageModelConfig(
        data=(folder / "book.txt",), out=folder / "run", model=decoder, fit=FitConfig(steps=1), device="cpu",
        tokenizer="characters", block_length=16, pictures=0, seed=seed,
    )  # fmt: skip
    train_language_model(config, overwrite=True)
    return folder / "run"


def test_a_run_that_was_trained_again_is_loaded_again(tmp_path: Path) -> None:
    measure, found = Measure(tmp_path / "run", device="cpu"), []
    for seed in (0, 1):
        book = train_book(tmp_path, seed=seed)
        rows = measure(pa.table({"text": ["a line", "a line of a book that is long"]})).to_pylist()
        weights = LanguageModel.load(book, device="cpu").attend("a line").maps["decoder.0"]
        for row in rows[:2]:
            assert row["n_tokens"] == len("a line") + 1
            assert row["entropy"] == pytest.approx(float(weights[row["head"]].entropy().mean()), abs=1e-6)
        assert rows[2]["error"] == "the text has 29 tokens; expected 1 to 15"
        found.append(rows[0]["entropy"])
    assert abs(found[0] - found[1]) > 1e-5


def test_a_translator_is_refused(tmp_path: Path) -> None:
    train_translation(small_config(tmp_path, steps=1, validate_every=1))
    with pytest.raises(ArgumentError, match="a translator of a run reads pairs"):
        Measure(tmp_path / "run", device="cpu")(pa.table({"text": ["a line"]}))
