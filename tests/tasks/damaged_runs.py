"""Run folders that something happened to: a bit flipped, an end cut off, a file gone."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from regard.errors import RegardError
from regard.tasks.registry import task_of
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.training.checkpoints import Checkpoints
from regard.tasks.translation.config import TranslationConfig
from tests.fuzz.drawing import Drawn
from tests.fuzz.files.mutations import mutate_bytes
from tests.tasks.small_runs import changed


def damage(run: Path, name: str, drawn: Drawn) -> bool:
    before = (run / name).read_bytes()
    after = mutate_bytes(drawn, before)
    (run / name).write_bytes(after)
    return before != after


def outcome(run: Path, uses: Sequence[Callable[[Any], Any]]) -> list[Any]:
    """A run's answer to each use of its model, or its error in words; then the result of resuming it."""
    answers: list[Any] = []
    for use in uses:
        try:
            answers.append(use(task_of(run).load(run, device="cpu")))
        except (RegardError, OSError) as error:
            answers.append(error)
    try:
        answers.append(resumed(run))
    except (RegardError, OSError) as error:
        answers.append(error)
    return answers


def resumed(run: Path) -> list[tuple[str, bytes]]:
    task = task_of(run)
    config = RunFolder(run).read_config(RunFolder(run).task(), task.config)
    task.run(changed(config, out=run, steps=config.fit.steps + 2), resume=True)
    state = Checkpoints(run).load_last()
    parts = [part for part in state if isinstance(part, dict)]
    return [(name, part[name].numpy().tobytes()) for part in parts for name in sorted(part)]


def snapshot(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def settings_of(run: Path, **changes: Any) -> TranslationConfig:
    return changed(RunFolder(run).read_config("translation", TranslationConfig), out=run, **changes)


def copy_of(run: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(run, folder))
