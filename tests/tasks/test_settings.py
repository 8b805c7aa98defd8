"""The recipes of `regard train`: settings that fit, over which flags and files win."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks import quality
from regard.cli.defaults import Beginning
from regard.cli.main import run_command
from regard.errors import ArgumentError, RunFolderError
from regard.tasks.recipes import TRAINING_RECIPES
from regard.tasks.registry import TASKS
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.runs.serialisation import changed, from_plain, to_plain
from regard.tasks.text.tokenizer_recipes import MOST_PIECES, ByteLevelBPE
from tests.tasks.small_runs import write_pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    dim: int = 3
    depth: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    data: tuple[Path, ...]
    kind: Literal["a", "b"] = "a"
    rate: float = 0.5
    limit: int | None = None
    shared: bool = False
    inner: Inner = field(default_factory=Inner)


FILE = Path("config.json")
SETTINGS = Outer(data=(Path("x.tsv"), Path("y.tsv")), kind="b", rate=0.1, limit=7, shared=True, inner=Inner(dim=5))


def test_round_trip() -> None:
    assert from_plain(Outer, to_plain(SETTINGS), source=FILE) == SETTINGS
    assert from_plain(Outer, {"data": []}, source=FILE) == Outer(data=())
    assert from_plain(Outer, {"data": [], "rate": 1}, source=FILE).rate == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 3}, "unknown setting colour; Outer has data, kind"),
        ({"inner": {"width": 3}}, r"unknown setting inner\.width; Inner has dim"),
        ({"inner": 3}, "inner must be Inner, got 3"),
        ({"kind": "c"}, r"kind must be Literal\['a', 'b'\], got 'c'"),
        ({"rate": "fast"}, "rate must be float, got 'fast'"),
        ({"limit": 1.5}, "limit must be int, got 1.5"),
        ({"shared": 1}, "shared must be bool, got 1"),
        ({"limit": True}, "limit must be int, got True"),
        ({"data": "x.tsv"}, "data must be a list, got 'x.tsv'"),
        ({"data": [3]}, r"data\[0\] must be Path, got 3"),
    ],
)
def test_what_is_not_ours_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RunFolderError, match=message):
        from_plain(Outer, to_plain(SETTINGS) | change, source=FILE)


def test_what_is_absent_and_has_no_default() -> None:
    with pytest.raises(RunFolderError, match="data"):
        from_plain(Outer, {}, source=FILE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "it has no config.json"),
        ('{"format": 4, "task": "t", "con', "not whole JSON"),
        ('{"model_type": "bert"}', "not the configuration of a t run"),
        ('{"format": 4, "task": "other", "config": {}}', "holds a run of other, and this needs one of t"),
        ('{"format": 1, "task": "t", "config": {}}', "another version of regard, .*expected format 4, got format 1"),
        ('{"format": 4, "task": "t", "config": {"data": [], "x": 1}}', "unknown setting x"),
    ],
)
def test_a_folder_that_is_not_a_run(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(RunFolderError, match=message):
        RunFolder(tmp_path).read_config("t", Outer)
    with pytest.raises(RunFolderError, match="is not a folder"):
        RunFolder(tmp_path / "absent").read_config("t", Outer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    inner: Inner = field(default_factory=lambda: Inner(dim=7, depth=8))


def test_what_is_absent_within_a_part_has_the_default_of_the_whole() -> None:
    assert from_plain(Around, {"inner": {"dim": 1}}, source=FILE) == Around(inner=Inner(dim=1, depth=8))
    assert from_plain(Around, {}, source=FILE) == Around()


def test_changes_leave_what_they_do_not_name() -> None:
    before = Around(inner=Inner(dim=4, depth=5))
    assert changed(before, {"inner": {"depth": 6}}, source=FILE) == Around(inner=Inner(dim=4, depth=6))
    assert changed(before, {}, source=FILE) == before
    with pytest.raises(RunFolderError, match=r"unknown setting inner\.width"):
        changed(before, {"inner": {"width": 6}}, source=FILE)


def test_a_vocabulary_for_which_no_trainer_has_room_is_refused() -> None:
    ByteLevelBPE(vocab_size=MOST_PIECES)
    with pytest.raises(ArgumentError, match="must be at most 16,777,216, got 16,777,217"):
        ByteLevelBPE(vocab_size=MOST_PIECES + 1)


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
