"""The tests are packages, so that two files may bear one name and any folders can be collected in one command."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
"""Of the project. Processes that run a module of the tests (`python -m tests.soak.soak`) start here."""


def each_once(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows in which each value of each axis is at least once, for axes that do not meet in the code under test."""
    values = [list(axis) for axis in axes]
    return [tuple(axis[row % len(axis)] for axis in values) for row in range(max(map(len, values)))]


def by_day(often: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """The values, of which those that are not among `often` wait for `make nightly`."""
    often = list(often)
    return [one if one in often else pytest.param(one, marks=pytest.mark.slow) for one in every]
