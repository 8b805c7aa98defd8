"""The base of all commands, and code shared by several."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, cast

import tyro

from regard.errors import ArgumentError
from regard.files.model_folder import snapshot_of
from regard.tasks.config import LANGUAGE_MODEL, TRANSLATION
from regard.tasks.registry import task_name_of
from regard.tasks.text.forms import RunningText
from regard.tasks.text.lines import BadLines, DataFormat, Reader

if TYPE_CHECKING:
    from regard.tasks.translation.translation_model import AlignmentOf

Mean = Literal["mean"]
"""Stands for all layers or heads, where else one is named by its number."""
P = TypeVar("P")
PositionalPath = tyro.conf.Positional[Path]
Run = Annotated[PositionalPath, tyro.conf.arg(help="the folder that `regard train` made.")]
AnyRun = Annotated[
    PositionalPath,
    tyro.conf.arg(help="the folder that `regard train` made, or a translator's in Hugging Face's format."),
]
"""A run folder, the first argument of most commands."""
Device = Annotated[str, tyro.conf.arg(help="auto, cpu, cuda, cuda:N or mps.")]


class Command(ABC):
    """A command: a frozen dataclass whose fields are its arguments, each with its help as the docstring below it.

    tyro makes one of the command line, and Python makes one like any object; calling it checks and works:

        TranslateCommand(Path("runs/mine"), ("a sentence",), beam=3)()
    """

    __slots__ = ()

    def __call__(self) -> None:
        command = self.at_snapshots()
        command.check()
        command.work()

    def at_snapshots(self) -> Self:
        """The command with the snapshot in the place of each folder of Hugging Face's cache."""
        own: Any = self
        paths = {one.name: value for one in fields(own) if isinstance(value := getattr(self, one.name), Path | tuple)}
        found = {
            name: tuple(map(_snapshot, value)) if isinstance(value, tuple) else _snapshot(value)
            for name, value in paths.items()
        }
        return cast(Self, replace(own, **found)) if found != paths else self

    @abstractmethod
    def check(self) -> None:
        """Refuse arguments before anything is read."""

    @abstractmethod
    def work(self) -> None:
        """Do the work with checked arguments."""

    def given(self, *flags: str) -> list[str]:
        """Those of the command's flags whose values are not the defaults, in the order of the call."""
        defaults = {f"--{one.name.replace('_', '-')}": one for one in fields(cast(Any, self))}
        own = [flag for flag in flags if flag in defaults]
        return [flag for flag in own if getattr(self, defaults[flag].name) != defaults[flag].default]

    def part(self, kind: type[P], **more: Any) -> P:
        """Make another dataclass of the fields of the same names, and of `more`."""
        names = [one.name for one in fields(cast(Any, kind)) if one.name not in more]
        return kind(**{name: getattr(self, name) for name in names}, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingCommand(Command):
    """A command that reads files of pairs or of text, all of them alike."""

    data_format: DataFormat | None = None
    """the form of the files, if their names do not tell: of pairs, tables with tabs (tsv; tsv-extra has further
    columns, which are ignored) or with commas or semicolons (csv, csv-no-header), jsonl, tmx, or aligned files; of
    text, lines (text) or jsonl."""
    bad_lines: BadLines = "stop"
    """whether a line that cannot be read ends the work, or is left out and counted; where each line has an answer, that
    answer is an empty line."""

    @property
    def reading(self) -> dict[str, Any]:
        return {"format": self.data_format, "bad_lines": self.bad_lines}

    @staticmethod
    def tell(*readers: Reader[Any] | RunningText) -> None:
        """Say in one line on standard error which lines were left out, if there are any."""
        if told := [line for reader in readers for line in reader.told]:
            print("; ".join(told), file=sys.stderr)


def _snapshot(value: object) -> object:
    return snapshot_of(value) if isinstance(value, Path) else value


def below(flag: str, value: int | None) -> tuple[bool, str]:
    """A check for `refuse_first`: a number must be at least 1, if it was given."""
    return value is not None and value < 1, f"{flag} must be at least 1, got {value}"


def refuse_first(*wrongs: tuple[bool, str]) -> None:
    for is_wrong, message in wrongs:
        if is_wrong:
            raise ArgumentError(message)


def alignment_of(layer: int | Mean | None, head: int | Mean | None) -> "AlignmentOf":
    from regard.tasks.translation.translation_model import AlignmentOf

    chosen = AlignmentOf().layer if layer is None else layer
    return AlignmentOf(layer=None if chosen == "mean" else chosen, head=None if head == "mean" else head)


KINDS = {
    TRANSLATION: ("a translator", "translate"),
    LANGUAGE_MODEL: ("a language model", "generate"),
}
"""The name of a run of each task, and its command."""


def require_task(run: Path, task: str) -> None:
    found = task_name_of(run)
    if found != task:
        kind, use = KINDS[found]
        raise ArgumentError(f"{run} is {kind}, not {KINDS[task][0]}: regard {use} {quote(str(run))}")


def say(line: str) -> None:
    print(f"regard: {line}", file=sys.stderr, flush=True)


def print_table(rows: Iterable[tuple[str, ...]]) -> None:
    for row in rows:
        print("\t".join(row))
