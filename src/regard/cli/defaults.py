"""The settings of `regard train` before any flag changes them."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, cast

import tyro

from regard.cli.headings import Defaults
from regard.errors import ArgumentError, RunFolderError
from regard.models.sizes import Size
from regard.tasks.config import TrainingConfig
from regard.tasks.recipes import overridden, recipe_of
from regard.tasks.registry import TASKS, Task
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.runs.serialisation import changed, from_plain
from regard.tasks.runs.toml import read_toml

USUAL = "translation"
"""The task of a run if nothing names a task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The flags with a say in the defaults of all others, which are read before them."""

    out: Path | None = None
    data: tuple[str, ...] = ()
    config: Path | None = None
    size: str | None = None
    recipe: str | None = None
    resume: bool = False
    steps: str | None = None
    epochs: str | None = None


@dataclass(frozen=True, slots=True)
class Beginning:
    """A task, and its settings before any flag: the defaults, changed by a recipe and a file, or those of a run."""

    task: str
    defaults: Defaults

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Self:
        named = arguments[0] if arguments and arguments[0] in TASKS else None
        rest = arguments[1:] if named else arguments
        origin, _ = tyro.cli(Origin, prog="regard train", args=rest, add_help=False, return_unknown_args=True)
        in_file, settings = read_toml(origin.config) if origin.config is not None else (None, {})
        recipe = None if origin.recipe is None else recipe_of(origin.recipe)
        if recipe is not None:
            for where, task in (("the command", named), (origin.config, in_file)):
                if task not in (None, recipe.task):
                    raise ArgumentError(f"the recipe {origin.recipe} is for the task {recipe.task}, {where} for {task}")
            in_file, settings = recipe.task, overridden(recipe.settings, settings)
        if origin.steps is not None and origin.epochs is not None:
            raise ArgumentError("--steps and --epochs both say how long to train: give one of them")
        source, run = origin.config or Path(), RunFolder(origin.out or Path())
        has_begun = run.holds_a_run() or not (origin.data or origin.config)
        if origin.resume and origin.out is not None and has_begun:
            if not run.holds_a_run():
                raise ArgumentError(f"there is no run in {origin.out} to go on with: to begin one, give --data")
            task = _known_task(named or in_file or run.task())
            saved = run.read_config(task, TASKS[task].config)
            defaults = Defaults(changed(saved, settings, source=source))
        else:
            if recipe is None and in_file is not None and named not in (None, in_file):
                raise ArgumentError(f"{source} is for the task {in_file!r}, and the command is for {named!r}")
            task = _known_task(named or in_file or USUAL)
            defaults = _defaults(TASKS[task], settings, source)
        if origin.steps is not None:  # they count, also in a run begun with --epochs
            settings_in_steps = replace(defaults.settings, fit=replace(defaults.settings.fit, epochs=0))
            defaults = Defaults(settings_in_steps, defaults.required)
        return cls(task, _sized(TASKS[task], defaults, origin.size))

    def of_class(self, cls: type[TrainingConfig]) -> Defaults:
        """The settings of a class: these if it is the class of this task, and otherwise the defaults of its task."""
        task = next(task for task in TASKS.values() if task.config is cls)
        return self.defaults if task is TASKS[self.task] else _defaults(task, {}, Path())


def _known_task(name: Any) -> str:
    if name not in TASKS:
        raise ArgumentError(f"the task must be one of {', '.join(TASKS)}, got {name!r}")
    return str(name)


def _defaults(task: Task, settings: dict[str, Any], source: Path) -> Defaults:
    """The settings of a file. A flag must give each setting without a default, unless the file has it."""
    required = {one.name for one in fields(task.config) if MISSING is one.default is one.default_factory}
    absent = required - set(settings)
    placeholders: dict[str, Any] = {"data": [], "out": ""}
    try:
        plain = settings | {name: placeholders[name] for name in absent}
        return Defaults(from_plain(task.config, plain, source=source), frozenset(absent))
    except RunFolderError as error:
        raise ArgumentError(str(error)) from None


def _sized(task: Task, defaults: Defaults, size: str | None) -> Defaults:
    """Change the defaults to a model of a named size."""
    if size is None:
        return defaults
    if size not in task.sizes:
        raise ArgumentError(f"the size must be one of {', '.join(task.sizes)}, got {size!r}")
    return Defaults(task.sized(defaults.settings, cast(Size, size)), defaults.required)
