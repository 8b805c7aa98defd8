"""`make fuzz` in small: each ground for a few seconds, always the same cases."""

import subprocess
import sys
from importlib import import_module

import pytest

from tests import ROOT
from tests.fuzz.grounds import GROUNDS
from tests.fuzz.search import cover, search


def found(ground: str, seeds: range, cases: int = 25) -> str | None:
    case = GROUNDS[ground].load()
    for seed in seeds:
        _, failure = search(ground, case, seed, cases, known=None)
        if failure is not None:
            return f"{failure.kind}\n{failure.text}"
    return None


@pytest.mark.parametrize(
    ("case", "cases"),
    [
        ("core.ground:values", 200),
        ("core.ground:gradients", 120),
        ("core.ground:case", 20),
        ("watch.ground:check_writing", 80),
        ("watch.ground:check_model", 80),
        ("watch.generation:check_generation", 40),
        ("paths.ground:case", 80),
        ("lifetimes.ground:case", 60),
        ("maps.ground:case", 300),
    ],
)
def test_cases_in_which_every_choice_is_drawn_find_nothing(case: str, cases: int) -> None:
    module, _, name = case.partition(":")
    missed = cover(getattr(import_module(f"tests.fuzz.{module}"), name), cases)
    assert missed == [] or cases < 80


@pytest.mark.parametrize(("ground", "cases"), [("files", 24), ("positions", 20), ("text", 6)])
def test_a_short_search_finds_nothing(ground: str, cases: int) -> None:
    assert found(ground, range(1), cases) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ground", "seed"),
    [
        ("core", 5),
        ("core", 8),
        ("maps", 2),
        ("watch", 0),
        ("paths", 28),
        ("lifetimes", 0),
        ("lifetimes", 2),
        ("files", 0),
        ("files", 1),
        ("positions", 593730456),
    ],
)
def test_a_longer_search_finds_nothing(ground: str, seed: int) -> None:
    """The seeds that find the faults of tests/faults/fuzz.toml at once."""
    assert found(ground, range(seed, seed + 3)) is None


@pytest.mark.slow
def test_a_failure_is_told_with_the_command_that_runs_it_again() -> None:
    """In processes of its own, as `make fuzz` runs it: one ground has a fault, and one ends its process."""
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.fuzz", "--minutes", "1", "--seed", "3", "--rounds", "1",
            "--only", "faulty,deadly",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "the number is 7" in done.stdout
    assert "again: make fuzz ONLY=faulty SEED=3 ROUNDS=1" in done.stdout
    assert "killed by SIGABRT" in done.stdout
    assert "again: make fuzz ONLY=deadly SEED=3 ROUNDS=1" in done.stdout
