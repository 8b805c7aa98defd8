"""A small translation's configuration, for all tests of the tasks."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from regard.tasks.translation.config import TranslationConfig
from tests.tasks.small_runs import small_config


@pytest.fixture
def config(tmp_path: Path) -> TranslationConfig:
    return small_config(tmp_path)
