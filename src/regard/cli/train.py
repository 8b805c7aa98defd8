"""`regard train`: train a model on the user's own text."""

import logging
import sys
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, ClassVar, TypeVar

import tyro

from regard.cli.loading import loading, speaks
from regard.cli.shared import Command
from regard.errors import ArgumentError, RegardError
from regard.models.config import Size
from regard.tasks.config import TrainingConfig
from regard.tasks.recipes import RecipeName, recipes_told
from regard.tasks.registry import TASKS, Task
from regard.tasks.runs.refusals import refuse_settings
from regard.tasks.runs.run_folder import RunFolder

USES = {
    "translation": "regard translate {}",
    "language-model": 'regard generate {} "a prompt"',
}
"""For each task, a command for the trained model."""
NAMELESS = tyro.conf.arg(name="")
"""Keeps the name of a parameter out of the names of its flags."""
F = TypeVar("F")
Flag = Annotated[F, tyro.conf.arg(prefix_name=False)]
"""Keeps the name of the group out of the name of a flag."""


RECIPES_HELP = f"Settings that were measured; flags and --config override them. {recipes_told()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How to begin a run, or go on with one."""

    size: Flag[Size | None] = None
    """A model of a size that papers name; flags for its parts override it."""
    recipe: Annotated[RecipeName | None, tyro.conf.arg(prefix_name=False, help=RECIPES_HELP)] = None
    config: Flag[Path | None] = None
    """A TOML file of settings, such as run.toml in a run folder; flags override it."""
    resume: Flag[bool] = False
    """Go on with the run in --out, or begin it if there is none; settings that are not given stay as they were."""
    overwrite: Flag[bool] = False
    """Replace the run in --out, once the new data have been read."""


class Train(Command):
    """Train a model; for each task there is a class with the settings of it."""

    __slots__ = ()
    task: ClassVar[str]
    settings: Any
    beginning: Start

    def check(self) -> None:
        start = self.beginning
        if start.resume and start.overwrite:
            raise ArgumentError("--resume goes on with a run and --overwrite replaces it: give one of them")
        if speaks():  # the other ranks may come when the folder is made
            refuse_settings(self.task, self.settings, resume=start.resume, overwrite=start.overwrite)

    def work(self) -> None:
        _train(self.task, self.settings, self.beginning)


def _trainer(name: str, task: Task) -> type[Train]:
    arguments: list[Any] = [("settings", Annotated[task.config, NAMELESS]), ("beginning", Start, Start())]
    named = {"task": name, "__doc__": task.config.__doc__, "__module__": __name__}
    return make_dataclass(f"Train {name}", arguments, bases=(Train,), namespace=named, frozen=True, slots=True)


TRAINERS = {name: _trainer(name, task) for name, task in TASKS.items()}


def _train(task: str, settings: TrainingConfig, start: Start) -> None:
    again, folder = f"regard train --out {quote(str(settings.out))} --resume", RunFolder(settings.out)
    with loading("lightning_fabric", "tokenizers", "rich"):
        import regard.tasks.language_modelling.train
        import regard.tasks.translation.train  # noqa: F401  (the task imports one of them)

    # Fabric says "Using bfloat16 Automatic Mixed Precision" before the first word of ours; run.toml has the precision.
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    try:
        TASKS[task].run(settings, resume=start.resume, overwrite=start.overwrite, progress=sys.stderr)
    except KeyboardInterrupt as stop:
        if folder.holds_a_run():
            stop.add_note(f"go on with: {again}")
        raise
    except OSError as stop:
        if not isinstance(stop, RegardError) and folder.holds_a_run() and folder.checkpoints.has("last"):
            step = folder.checkpoints.position("last").step
            stop.add_note(f"the checkpoint of step {step:,} is whole: go on with: {again}")
        raise
    if speaks():
        use = USES[task].format(quote(str(settings.out)))
        print(f"the best model is in {settings.out}: {use}", file=sys.stderr)
