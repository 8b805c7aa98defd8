"""Small runs, made once for all tests of the exports."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from runs import make_run


@pytest.fixture(scope="session")
def run_of(tmp_path_factory):
    """A run by its name."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = make_run(name, tmp_path_factory.mktemp("run"))
        return made[name]

    return of
