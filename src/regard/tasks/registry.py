"""The tasks by name: how each is configured, trained and loaded."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from regard.errors import RunFolderError
from regard.models.sizes import DECODER_ONLY_SIZES, ENCODER_ONLY_SIZES, TRANSFORMER_SIZES, Size
from regard.tasks.config import TrainingConfig
from regard.tasks.language_modelling import causal, masked
from regard.tasks.language_modelling.causal import LanguageModel
from regard.tasks.language_modelling.config import LanguageModelConfig, MaskedLanguageModelConfig
from regard.tasks.language_modelling.masked import MaskedLanguageModel
from regard.tasks.language_modelling.train import (
    masked_job,
    next_token_job,
    run_language_model,
    run_masked_language_model,
)
from regard.tasks.runs.run import TrainingJob
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.translation import translator
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.pretrained import is_huggingface, writes_text
from regard.tasks.translation.train import run_translation, translation_job
from regard.tasks.translation.translator import Translator

TrainedModel = Translator | LanguageModel | MaskedLanguageModel


class Task(NamedTuple):
    """One task."""

    config: type[TrainingConfig]
    run: Callable[..., str]
    """Trains, and returns the name of the device that it ran on."""
    load: Callable[..., TrainedModel]
    job: Callable[[Any, RunFolder, Any], TrainingJob]
    """Makes the training loop's job from a configuration, a prepared folder and a launched fabric."""
    model_field: str
    """The name of the setting that describes the model."""
    sizes: Mapping[Size, Any]
    """The values of that setting that have a name."""

    def sized(self, config: Any, size: Size) -> Any:
        """Change settings to a model of a named size."""
        return replace(config, **{self.model_field: self.sizes[size]})


TASKS: Mapping[str, Task] = {
    translator.TASK: Task(
        TranslationConfig, run_translation, Translator.load, translation_job, "transformer", TRANSFORMER_SIZES
    ),
    causal.TASK: Task(
        LanguageModelConfig, run_language_model, LanguageModel.load, next_token_job, "model", DECODER_ONLY_SIZES
    ),
    masked.TASK: Task(
        MaskedLanguageModelConfig,
        run_masked_language_model,
        MaskedLanguageModel.load,
        masked_job,
        "model",
        ENCODER_ONLY_SIZES,
    ),
}


def task_of(folder: Path) -> Task:
    """Find the task of a run folder, or of a folder in Hugging Face's format.

    Raises:
        RunFolderError: there is no run in it, or its task is one that this version does not have.
    """
    if is_huggingface(folder):
        return TASKS[causal.TASK if writes_text(folder) else translator.TASK]
    name = RunFolder(folder).task()
    if name not in TASKS:
        raise RunFolderError(f"{folder} is a run of the task {name!r}; this version has {', '.join(TASKS)}")
    return TASKS[name]
