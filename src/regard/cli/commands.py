"""The commands, and how the arguments of the command line choose one of them."""

import inspect
from collections.abc import Container, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, cast, get_origin, get_type_hints

import tyro

from regard.cli.align_pairs import AlignCommand
from regard.cli.arguments import EXAMPLES, Known, described, documented, refuse_bare_lists, told_in_one_line, with_flags
from regard.cli.check import CheckCommand
from regard.cli.defaults import FIRST, Beginning, settings_as_flags
from regard.cli.demo import DemoCommand
from regard.cli.evaluate import EvaluateCommand
from regard.cli.export import ExportCommand
from regard.cli.generate import GenerateCommand
from regard.cli.measure import AtlasCommand, MeasureCommand
from regard.cli.serve import ServeCommand
from regard.cli.shared import Command
from regard.cli.train import TRAINERS
from regard.cli.translate import TranslateCommand
from regard.cli.view import ViewCommand
from regard.errors import ArgumentError
from regard.tasks.training.fit_config import FitConfig

DESCRIPTION = (
    "Train models with attention on your own text, use them, and see what they attend to. "
    "--version prints the version, and with --verbose those of the libraries and the folder of compiled code; "
    "--debug, with any command, shows the traceback of an error."
)
TRAIN = (
    "Train a model on your own text: a translator, unless another task is named. Each task has settings of its own: "
    "`regard train translation --help` shows those of a translator that a first run needs, and --help-all shows all."
)
COMMANDS: dict[str, type[Command]] = {
    one.__name__.removesuffix("Command").lower(): one
    for one in (
        *(TranslateCommand, GenerateCommand, AlignCommand, EvaluateCommand),
        *(ViewCommand, MeasureCommand, AtlasCommand, ServeCommand, CheckCommand),
        *(ExportCommand, DemoCommand),
    )
}
"""The commands other than `regard train`, by name."""
PLAIN = tyro.conf.configure(tyro.conf.PositionalMetavarFromFieldName, tyro.conf.DisallowNone)
"""How help shows their arguments: positional ones by name and not by type, and None is not shown as a value."""


def chosen_command(arguments: Sequence[str]) -> Command:
    if list(arguments[:2]) == ["measure", "--compare"]:
        arguments = ["atlas", *arguments[2:]]
        if any(one.startswith("-") for one in [*arguments[1:3], "-", "-"][:2]) and "--help" not in arguments:
            raise ArgumentError("--compare must be followed by two folders of statistics")
    with told_in_one_line(partial(_known, arguments)):
        refuse_bare_lists(arguments, _known(arguments))
        beginning = Beginning.of(arguments[1:] if arguments[:1] == ["train"] else [])
        arguments, shown = _of_help(arguments, beginning.task)
        app, train = tyro.extras.SubcommandApp(), tyro.extras.SubcommandApp()
        for task, trainer in TRAINERS.items():
            about = _help_of(trainer, f"train {task}", arguments)
            train.command(name=task, help=about, is_default=task == beginning.task)(trainer)
        of_train = described(TRAIN, EXAMPLES["train"]) if arguments[:1] == ["train"] else TRAIN
        app.command(train, name="train", help=of_train)
        for name, command in COMMANDS.items():
            app.command(name=name, help=_help_of(command, name, arguments))(PLAIN(command))
        registry = settings_as_flags(beginning.of_class, shown=shown)
        description = described(DESCRIPTION, EXAMPLES[""])
        run = app.cli(prog="regard", description=description, args=arguments, registry=registry)
    return cast(Command, run)


def _of_help(arguments: Sequence[str], task: str) -> tuple[Sequence[str], Container[str] | None]:
    asked = {"-h", "--help", "--help-all"} & set(arguments)
    if not asked or arguments[:1] != ["train"]:
        return ["--help" if one == "--help-all" else one for one in arguments], None
    words = ["train"] if len(arguments) == 2 else ["train", task]
    return [*words, "--help"], None if "--help-all" in asked else FIRST


def in_flags(message: str, arguments: Sequence[str]) -> str:
    if "--config" in " ".join(arguments):
        return message  # it may be about the file, which has Python's names
    typed = {argument.partition("=")[0] for argument in arguments}
    return with_flags(message, sorted(_known(arguments).flags, key=lambda flag: flag not in typed))


def _help_of(command: type[Command], name: str, arguments: Sequence[str]) -> str:
    asked = list(arguments[: name.count(" ") + 1]) == name.split()
    return documented(command, name) if asked else (inspect.getdoc(command) or "").split("\n")[0]


def _known(arguments: Sequence[str]) -> Known:
    match arguments:
        case ["train", task, *_] if task in TRAINERS:
            return _known_of(TRAINERS[task])
        case ["train", *_]:
            return _known_of(TRAINERS["translation"], list(TRAINERS))
        case [name, *_] if name in COMMANDS:
            return _known_of(COMMANDS[name])
        case _:
            return Known(commands=["train", *COMMANDS])


def _known_of(command: type[Command], commands: Sequence[str] = ()) -> Known:
    kinds = dict(_flags(command))
    return Known(list(kinds), commands, [flag for flag, kind in kinds.items() if get_origin(kind) is tuple])


def _flags(described: Any, prefix: str = "--") -> Iterator[tuple[str, Any]]:
    """tyro's flags of a command or of settings, each with the type of its value; `headings` drops prefixes."""
    kinds, is_command = get_type_hints(described), issubclass(described, Command)
    typed = get_type_hints(described, include_extras=True)
    for one in fields(described):
        if tyro.conf.Positional in getattr(typed[one.name], "__metadata__", ()):
            continue
        flag, kind = prefix + one.name.replace("_", "-"), kinds[one.name]
        if is_dataclass(kind):
            yield from _flags(kind, prefix if is_command or kind is FitConfig else f"{flag}.")
        else:
            yield flag, kind
