"""Runs for all tests of exports, each trained once."""

import shutil
from pathlib import Path

import pytest

from regard.tasks.runs.run_folder import ENGINE
from tests.exports.exported_runs import Runs


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run by its name. Its folder is for reading; an engine may keep its export there."""
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def run(run_of: Runs, tmp_path: Path) -> Path:
    return shutil.copytree(run_of("pre"), tmp_path / "run", ignore=shutil.ignore_patterns(ENGINE))
