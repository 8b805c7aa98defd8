"""`regard train`: train a model on the user's own text."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from regard.cli.loading import loading
from regard.errors import ArgumentError
from regard.models.sizes import Size
from regard.tasks.config import TrainingConfig
from regard.tasks.language_modelling.config import LanguageModelConfig, MaskedLanguageModelConfig
from regard.tasks.registry import TASKS
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.translation.config import TranslationConfig

USES = {
    "translation": "regard translate {}",
    "language-model": 'regard generate {} "a prompt"',
    "masked-language-model": 'regard view {} "a sentence"',
}
"""For each task, a command that uses the trained model."""
NAMELESS = tyro.conf.arg(name="")
"""Keeps the name of a parameter out of the names of its flags."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How to begin a run, or go on with one."""

    size: Size | None = None
    """A model of a size that papers name; flags for its parts override it."""
    config: Path | None = None
    """A TOML file of settings, such as run.toml in a run folder; flags override it."""
    resume: bool = False
    """Go on with the run in --out, or begin it if there is none; settings that are not given stay as they were."""
    overwrite: bool = False
    """Replace the run in --out, once the new data have been read."""


def translation_trainer(
    settings: Annotated[TranslationConfig, NAMELESS], start: Annotated[Start, NAMELESS] = Start()
) -> None:
    """Train a translator on pairs of sentences."""
    _train("translation", settings, start)


def language_model_trainer(
    settings: Annotated[LanguageModelConfig, NAMELESS], start: Annotated[Start, NAMELESS] = Start()
) -> None:
    """Train a language model on running text."""
    _train("language-model", settings, start)


def masked_language_model_trainer(
    settings: Annotated[MaskedLanguageModelConfig, NAMELESS], start: Annotated[Start, NAMELESS] = Start()
) -> None:
    """Train a model to fill in masked tokens of running text."""
    _train("masked-language-model", settings, start)


TRAINERS: dict[str, Callable[..., None]] = {
    "translation": translation_trainer,
    "language-model": language_model_trainer,
    "masked-language-model": masked_language_model_trainer,
}
"""The command of each task."""


def _train(task: str, settings: TrainingConfig, start: Start) -> None:
    if start.resume and start.overwrite:
        raise ArgumentError("--resume goes on with a run and --overwrite replaces it: give one of them")
    with loading("lightning_fabric", "tokenizers"):
        import regard.tasks.runs.run  # noqa: F401  (the task imports it)

    try:
        TASKS[task].run(settings, resume=start.resume, overwrite=start.overwrite, progress=sys.stderr)
    except KeyboardInterrupt as stop:
        if RunFolder(settings.out).holds_a_run():
            stop.add_note(f"go on with: regard train --out {settings.out} --resume")
        raise
    if os.environ.get("RANK", "0") == "0":  # one rank speaks for all
        print(f"the best model is in {settings.out}: {USES[task].format(settings.out)}", file=sys.stderr)
