"""The recipes of `regard train`: settings that fit, over which flags and files win."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quality
from regard.cli.defaults import Beginning
from regard.cli.main import run_command
from regard.tasks.recipes import TRAINING_RECIPES
from regard.tasks.registry import TASKS
from regard.tasks.runs.serialisation import to_plain
from tests.tasks.small_runs import write_pairs

SMALL = "--vocab-size 300 --transformer.dim 8 --transformer.num-heads 2 --transformer.encoder-layers 1 --device cpu"


def leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@pytest.mark.parametrize("name", TRAINING_RECIPES)
def test_every_setting_of_a_recipe_is_taken(name: Any) -> None:
    recipe = TRAINING_RECIPES[name]
    beginning = Beginning.of(["--recipe", name, "--data", "x", "--out", "nowhere"])
    assert beginning.task == recipe.task
    found = dict(leaves(to_plain(beginning.defaults.settings)))
    usual = dict(leaves(to_plain(Beginning.of([recipe.task]).defaults.settings)))
    for setting, value in leaves(recipe.settings):
        assert found.pop(setting) == value
        usual.pop(setting)
    assert found == usual
    assert isinstance(beginning.defaults.settings, TASKS[recipe.task].config)


def test_flags_and_files_win_and_the_same_command_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, file = write_pairs(tmp_path / "pairs.tsv"), tmp_path / "mine.toml"
    file.write_text("batch_tokens = 700\n[fit]\npatience = 2\nema_decay = 0.5\n[transformer]\nfeed_forward_dim = 12\n")
    run = tmp_path / "run"
    command = f"train --recipe small-data --config {file} --data {data} --out {run} {SMALL} --ema-decay 0.25".split()
    assert run_command([*command, "--steps", "1", "--resume"]) == 0
    kept = json.loads((run / "config.json").read_text())["config"]
    expected = {"batch_tokens": 700, "learning_rate": 0.005, "shared_vocabulary": True, "vocab_size": 300}
    assert {name: kept[name] for name in expected} == expected
    assert (kept["fit"]["steps"], kept["fit"]["patience"], kept["fit"]["ema_decay"]) == (1, 2, 0.25)
    assert kept["fit"]["validate_every"] == 400
    model = kept["transformer"]
    assert (model["dim"], model["feed_forward_dim"], model["decoder_layers"], model["dropout"]) == (8, 12, 4, 0.3)
    assert run_command([*command, "--steps", "2", "--resume"]) == 0
    assert json.loads((run / "config.json").read_text())["config"]["fit"]["steps"] == 2
    # What the command of the run had set otherwise is no longer the recipe's.
    assert run_command(f"train --recipe small-data --out {run} --resume".split()) == 2
    assert len(capsys.readouterr().err.splitlines()[-1:]) == 1


def test_help_says_what_each_was_measured_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", "translation", "--help"]) == 0
    shown = "".join(capsys.readouterr().out.replace("│", " ").split())
    for name, recipe in TRAINING_RECIPES.items():
        assert "".join(f"{name}: {recipe.purpose}. {recipe.measured}.".split()) in shown


def test_the_benchmark_trains_by_the_recipes() -> None:
    for recipe in quality.RECIPES.values():
        arguments = recipe.settings.split()
        assert Beginning.of(arguments).task == "translation"
        assert arguments[arguments.index("--recipe") + 1] in TRAINING_RECIPES
