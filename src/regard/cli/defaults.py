"""The settings of `regard train` as flags: their headings, and their values before any flag changes them."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, cast

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from regard.errors import ArgumentError, RunFolderError
from regard.models.config import Size
from regard.tasks.config import TrainingConfig
from regard.tasks.recipes import overridden, recipe_of
from regard.tasks.registry import TASKS, Task
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.runs.serialisation import changed, from_plain, read_toml
from regard.tasks.training.fit_config import FitConfig


@dataclass(frozen=True, slots=True)
class Heading:
    name: str
    text: str
    settings: tuple[str, ...] = ()


DATA = Heading(
    "data",
    "What the model learns from, and how text is cut into tokens.",
    (
        *("data", "valid", "valid_share", "data_format", "documents", "bad_lines"),
        *("tokenizer", "tokenizers_of", "vocab_size", "shared_vocabulary", "max_length", "block_length"),
    ),
)
MODEL = Heading("model", "What learns.", ("model", "transformer", "rnn", "warm_start"))
OUTPUT = Heading(
    "output",
    "Where the run goes, and what it tells and keeps on the way.",
    (
        *("out", "validate_every", "save_every", "log_every", "best_by", "validation_beam", "bleu_tokenize"),
        "pictures",
    ),
)
OPTIMISATION = Heading("optimisation", "How the model learns, for how long, and on what.")
"""All other settings."""
FIRST = frozenset(
    {
        *("data", "valid", "documents", "tokenizer", "vocab_size", "shared_vocabulary", "max_length", "block_length"),
        *("model", "warm_start", "out", "validate_every", "save_every", "best_by"),
        *("steps", "epochs", "patience", "batch_tokens", "learning_rate", "seed", "device", "precision"),
    }
)
"""The settings of a first run: with `--size` and the like they are the flags in `--help`."""


@dataclass(frozen=True, slots=True)
class Defaults:
    settings: TrainingConfig
    required: frozenset[str] = frozenset()
    """The names of the settings without a default; their values in `settings` are placeholders."""


def settings_as_flags(
    defaults: Callable[[type[TrainingConfig]], Defaults], *, shown: Container[str] | None = None
) -> ConstructorRegistry:
    """Make the rule by which tyro turns the settings in `shown` into flags; None for all, with the parts of a model."""
    registry = ConstructorRegistry()

    @registry.struct_rule
    def under_headings(info: StructTypeInfo) -> StructConstructorSpec | None:
        is_settings = isinstance(info.type, type) and issubclass(info.type, TrainingConfig)
        # If the default is settings too, tyro must find the fields itself: `_settings_of` asks it to.
        if not is_settings or isinstance(info.default, TrainingConfig):
            return None
        given = defaults(info.type)
        left = {}
        for one in _settings_of(given.settings):
            is_shown = shown is None or (one.name in shown and not is_dataclass(one.type))
            left[one.name] = _flag(one, is_required=one.name in given.required, is_shown=is_shown)
        groups = []
        for heading in (DATA, MODEL, OUTPUT):
            groups.append(_group(heading, [left.pop(name) for name in heading.settings if name in left]))
        groups.append(_group(OPTIMISATION, left.values()))
        return StructConstructorSpec(lambda **found: _put_together(info.type, found), tuple(groups))

    return registry


_Flag = tuple[str, Any, Any]
"""The name, type and default of a field, as `make_dataclass` takes them."""


def _settings_of(settings: Any) -> Iterator[StructFieldSpec]:
    spec = ConstructorRegistry.get_struct_spec(StructTypeInfo.make(type(settings), settings, in_union_context=False))
    assert isinstance(spec, StructConstructorSpec)
    for one in spec.fields:
        if one.type is FitConfig:
            yield from _settings_of(one.default)
        else:
            yield one


def _flag(one: StructFieldSpec, *, is_required: bool, is_shown: bool) -> _Flag:
    text = one.helptext() if callable(one.helptext) else one.helptext
    kind: Any = Annotated[one.type, tyro.conf.arg(prefix_name=False, help=text)]
    kind = kind if is_shown else cast(Any, tyro.conf.Suppress)[kind]
    return one.name, kind, field() if is_required else field(default=one.default)


def _group(heading: Heading, members: Iterable[_Flag]) -> StructFieldSpec:
    kind = make_dataclass(heading.name, members, frozen=True, kw_only=True)
    return StructFieldSpec(heading.name, kind, tyro.MISSING_NONPROP, heading.text)


def _put_together(cls: type[TrainingConfig], groups: Mapping[str, object]) -> TrainingConfig:
    values = {name: value for group in groups.values() for name, value in vars(group).items()}
    fit = FitConfig(**{one.name: values.pop(one.name) for one in fields(FitConfig)})
    return cls(fit=fit, **values)


USUAL = "translation"
"""The task of a run if nothing names a task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
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
        has_begun = run.holds_a_run() or run.has_lost_its_marker()
        if origin.resume and origin.out is not None and (has_begun or not (origin.data or origin.config)):
            if not has_begun:
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
    if size is None:
        return defaults
    if size not in task.sizes:
        raise ArgumentError(f"the size must be one of {', '.join(task.sizes)}, got {size!r}")
    return Defaults(task.sized(defaults.settings, cast(Size, size)), defaults.required)
