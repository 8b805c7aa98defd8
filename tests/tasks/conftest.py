"""A small translation's configuration and two small runs, for all tests of the tasks."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.train import train_translation
from tests.tasks.damaged_runs import copy_of
from tests.tasks.small_runs import small_config


@pytest.fixture
def config(tmp_path: Path) -> TranslationConfig:
    return small_config(tmp_path)


@pytest.fixture(scope="session")
def begun_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config(tmp_path_factory.mktemp("begun"), steps=4)
    train_translation(config)
    return config.out


@pytest.fixture
def begun_copy(begun_run: Path, tmp_path: Path) -> Path:
    return copy_of(begun_run, tmp_path / "run")


@pytest.fixture(scope="session")
def run_of_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    config = small_config(folder, steps=60, validate_every=60, save_every=60, tokenizer="words", max_length=8)
    train_translation(config)
    return folder / "run"
