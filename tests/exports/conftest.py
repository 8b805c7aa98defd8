"""Runs for all tests of exports, each trained once."""

import pytest

from tests.exports.exported_runs import Runs


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run by its name. Its folder is for reading; an engine may keep its export there."""
    return Runs(tmp_path_factory.mktemp("runs"))
