"""The tasks by name: how each is configured, trained and loaded. Only what trains or loads needs torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import RunFolderError
from regard.files.atomic import read_json
from regard.files.model_folder import is_huggingface
from regard.models.config import DECODER_ONLY_SIZES, TRANSFORMER_SIZES, Size
from regard.tasks.config import LANGUAGE_MODEL, TRANSLATION, TrainingConfig
from regard.tasks.language_modelling.config import LanguageModelConfig
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.pretrained import check_tokenizer
from regard.tasks.translation.config import TranslationConfig

if TYPE_CHECKING:
    from regard.tasks.language_modelling.causal import LanguageModel
    from regard.tasks.translation.translator import Translator


@dataclass(frozen=True, slots=True)
class Task:
    config: type[TrainingConfig]
    model_field: str
    """The name of the setting that describes the model."""
    sizes: Mapping[Size, Any]
    """The values of that setting that have a name."""
    trained: Callable[[], Any]
    """Imports the class of its trained models."""
    training: Callable[[], Callable[..., str]]
    """Imports the function that trains a run."""

    def sized(self, config: Any, size: Size) -> Any:
        return replace(config, **{self.model_field: self.sizes[size]})

    def run(self, config: Any, **options: Any) -> str:
        return self.training()(config, **options)

    def load(self, folder: Path | str, *, device: str = "auto") -> "Translator | LanguageModel":
        found: Translator | LanguageModel = self.trained().load(folder, device=device)
        return found


def _translator() -> Any:
    from regard.tasks.translation.translator import Translator

    return Translator


def _language_model() -> Any:
    from regard.tasks.language_modelling.causal import LanguageModel

    return LanguageModel


def _translation() -> Any:
    from regard.tasks.translation.train import run_translation

    return run_translation


def _next_tokens() -> Any:
    from regard.tasks.language_modelling.train import run_language_model

    return run_language_model


TASKS: Mapping[str, Task] = {
    TRANSLATION: Task(TranslationConfig, "transformer", TRANSFORMER_SIZES, _translator, _translation),
    LANGUAGE_MODEL: Task(LanguageModelConfig, "model", DECODER_ONLY_SIZES, _language_model, _next_tokens),
}


def task_name_of(folder: Path) -> str:
    if is_huggingface(folder):
        check_tokenizer(folder)
        return TRANSLATION if read_json(folder / "config.json").get("is_encoder_decoder") else LANGUAGE_MODEL
    name = RunFolder(folder).task()
    if name not in TASKS:
        raise RunFolderError(f"{folder} is a run of the task {name!r}; this version has {', '.join(TASKS)}")
    return name


def task_of(folder: Path) -> Task:
    return TASKS[task_name_of(folder)]
