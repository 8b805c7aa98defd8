"""`regard check`: whether a model attends as it should."""

import sys
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import tyro

from regard.cli.loading import loading
from regard.cli.progress import reading
from regard.cli.shared import Command, Device
from regard.corpus.settings import named_function
from regard.errors import ArgumentError
from regard.files.model_folder import OnProgress, is_huggingface, snapshot_of
from regard.tasks.registry import task_of

if TYPE_CHECKING:
    from torch import nn


class Target(NamedTuple):
    model: "nn.Module"
    batch: Any = None


@dataclass(frozen=True, slots=True)
class CheckCommand(Command):
    """Check that a model attends to what it should; the exit status is 1 if it does not, and 2 if that is not known.

    It runs on made-up sequences, and the masks that reached its kernels are compared with its arguments and its config.
    Then it runs again: short and long, alone and together, padded on either side, with a cache and without,
    under its own kernel and written out, and with its last tokens and its padding replaced. It prints
    results that changed and should not, and masks that are lost, transposed or inverted; the questions; and those that
    could not be asked, with the reasons.
    """

    model: tyro.conf.Positional[str]
    """a folder in Hugging Face's format, the folder of a run, or module:function, a function that returns a torch
    module, or (module, batch) with the arguments of one call."""
    _: KW_ONLY
    causal: bool | None = None
    """whether the model should be causal; by default its config says so, or the masks of most of its layers."""
    reference: str | None = None
    """a second implementation with the same weights, named as the model is: the first attention call that departs from
    it is told, with how it departs."""
    json: bool = False
    """print the findings, the questions and the trials as JSON."""
    device: Device = "auto"

    def check(self) -> None:
        for words in (self.model, *([] if self.reference is None else [self.reference])):
            if not Path(words).is_dir() and ":" not in words:
                raise ArgumentError(f"{words!r} is no folder; give a folder of a model, or module:function")

    def work(self) -> None:
        target = _read(self.model)
        other = None if self.reference is None else _read(self.reference).model
        from regard.tasks.training.distributed import find_device
        from regard.watching.checks.check_model import check

        device = find_device(self.device)
        checked = check(
            target.model.to(device), target.batch, causal=self.causal,
            reference=None if other is None else other.to(device),
        )  # fmt: skip
        print(checked.to_json() if self.json else _shown(str(checked)))
        if checked.faults or checked.unknown:
            raise SystemExit(1 if checked.faults else 2)


def _shown(text: str) -> str:
    """The text as wide as the terminal; elsewhere each finding stays a line, which `grep` finds."""
    if not sys.stdout.isatty():
        return text
    width = get_terminal_size().columns
    return "\n".join(_wrapped(line, width) for line in text.splitlines())


def _wrapped(line: str, width: int) -> str:
    below = " " * (len(line) - len(line.lstrip()) + 4)
    return "\n".join(wrap(line, width, subsequent_indent=below, break_long_words=False, break_on_hyphens=False))


def _read(words: str) -> Target:
    folder = snapshot_of(Path(words))
    foreign = is_huggingface(folder)
    with reading(folder if foreign else None) as tell:
        with loading(*["transformers"] * foreign):
            import regard.watching.checks.check_model  # noqa: F401
        return _target(words, folder, tell)


def _target(words: str, folder: Path, tell: OnProgress) -> Target:
    if not folder.is_dir():
        return _of_function(words)
    if not is_huggingface(folder):
        return Target(task_of(folder).load(folder).model)
    from regard.huggingface.folder import load_folder

    return Target(load_folder(folder, tell).model)


def _of_function(words: str) -> Target:
    from torch import nn

    try:
        found = named_function(words)()
    except Exception as error:
        raise ArgumentError(f"{words} gave no model: {type(error).__name__}: {error}") from error
    model, batch = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"{words} must return a torch.nn.Module, or (module, batch) with the arguments of one call; it returned "
            f"{type(found).__name__}"
        )
    return Target(model, batch)
