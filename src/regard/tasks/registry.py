"""The tasks that there are, by name: what each is configured, trained and used with."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from regard.errors import RunFolderError
from regard.models.sizes import DECODER_ONLY_SIZES, ENCODER_ONLY_SIZES, TRANSFORMER_SIZES, Size
from regard.tasks.config import TrainingConfig
from regard.tasks.language_modelling import causal as writer
from regard.tasks.language_modelling import masked as filler
from regard.tasks.language_modelling.causal import Writer
from regard.tasks.language_modelling.config import LanguageModelConfig, MaskedLanguageModelConfig
from regard.tasks.language_modelling.masked import Filler
from regard.tasks.language_modelling.train import (
    masked_job,
    next_token_job,
    run_language_model,
    run_masked_language_model,
)
from regard.tasks.runs.run import Job
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.translation import translator
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.pretrained import is_huggingface, writes_text
from regard.tasks.translation.train import run_translation, translation_job
from regard.tasks.translation.translator import Translator

TaskName = Literal["translation", "language-model", "masked-language-model"]
Trained = Translator | Writer | Filler


class Task(NamedTuple):
    """One task."""

    config: type[TrainingConfig]
    run: Callable[..., str]
    """Trains; the name of the device that it ran on."""
    load: Callable[..., Trained]
    job: Callable[[Any, RunFolder, Any], Job]
    """What the training loop is handed for a configuration, a prepared folder and a launched fabric."""
    model_field: str
    """The setting that describes the model."""
    sizes: Mapping[Size, Any]
    """Named values of it."""

    def sized(self, config: Any, size: Size) -> Any:
        """The settings with a model of a named size."""
        return replace(config, **{self.model_field: self.sizes[size]})


TASKS: Mapping[str, Task] = {
    translator.TASK: Task(
        TranslationConfig, run_translation, Translator.load, translation_job, "transformer", TRANSFORMER_SIZES
    ),
    writer.TASK: Task(
        LanguageModelConfig, run_language_model, Writer.load, next_token_job, "model", DECODER_ONLY_SIZES
    ),
    filler.TASK: Task(
        MaskedLanguageModelConfig, run_masked_language_model, Filler.load, masked_job, "model", ENCODER_ONLY_SIZES
    ),
}


def task_of(folder: Path) -> Task:
    """The task of a run folder, or of a folder in Hugging Face's format: a language model's or translation.

    Raises:
        RunFolderError: there is no run in it, or one of a task that this version does not have.
    """
    if is_huggingface(folder):
        return TASKS[writer.TASK if writes_text(folder) else translator.TASK]
    name = RunFolder(folder).task()
    if name not in TASKS:
        raise RunFolderError(f"{folder} is a run of the task {name!r}; this version has {', '.join(TASKS)}")
    return TASKS[name]
