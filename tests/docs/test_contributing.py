"""The recipes of CONTRIBUTING.md run as they stand, keep every contract, and their checks see a fault."""

import doctest
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import hypothesis
import pytest

from regard.kernels import BACKENDS
from tests.core import random_calls
from tests.fuzz.core.masks import MASKS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
RECIPES = ("Add a score", "Add a mask", "Add a backend")


def code_of(recipe: str) -> list[str]:
    section = re.search(rf"^### {recipe}\n(.*?)(?=^##|\Z)", PAGE.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert section is not None, f"CONTRIBUTING.md has no section {recipe!r}"
    return re.findall(r"```python\n(.*?)```", section[1], flags=re.DOTALL)


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(code, "recipe", "exec"), names)  # pytest would look for statements of Python in the page
    return names


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "recipe", ModuleType("recipe"))  # where dataclasses look their names up
    rounding = set(random_calls.ROUNDING)
    with (
        patch.dict(random_calls.SCORES),
        patch.dict(random_calls.FORMULAS),
        patch.dict(MASKS),
        patch.dict(BACKENDS),
        patch.object(random_calls, "ROUNDING", rounding),
        patch("tests.core.contracts.ROUNDING", rounding),
    ):
        yield


@pytest.fixture
def _few_examples() -> Iterator[None]:
    hypothesis.settings.register_profile("before", hypothesis.settings.default)
    hypothesis.settings.register_profile("few", hypothesis.settings.default, max_examples=12)
    hypothesis.settings.load_profile("few")
    yield
    hypothesis.settings.load_profile("before")


@pytest.mark.usefixtures("_few_examples")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_and_keeps_every_contract(recipe: str) -> None:
    blocks = code_of(recipe)
    assert re.search(r"^check_(score|mask|backend)\(", blocks[-1], flags=re.MULTILINE)
    names = run("\n".join(blocks))
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder(recurse=False).find(
        next(v for v in names.values() if getattr(v, "__module__", "") == "recipe"), "recipe", globs=names, module=False
    ):
        runner.run(test)
    assert runner.summarize().failed == 0


def test_the_commands_name_what_there_is() -> None:
    commands = re.findall(r"^\$ (.*?)(?:\s+#.*)?$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for command in commands:
        program, *arguments = command.split()
        if program == "make":
            assert {argument for argument in arguments if "=" not in argument} <= targets, command
            continue
        for path in (argument for argument in arguments if argument.startswith(("tests/", "src/"))):
            file, _, test = path.partition("::")
            assert (ROOT / file).exists(), command
            assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), command
    assert len(commands) > 6
