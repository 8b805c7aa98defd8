"""The tasks by name: how each is configured, trained and loaded. Only what trains or loads needs torch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import RunFolderError
from regard.models.sizes import DECODER_ONLY_SIZES, ENCODER_ONLY_SIZES, TRANSFORMER_SIZES, Size
from regard.tasks.config import TrainingConfig
from regard.tasks.language_modelling.config import LanguageModelConfig, MaskedLanguageModelConfig
from regard.tasks.names import LANGUAGE_MODEL, MASKED_LANGUAGE_MODEL, TRANSLATION
from regard.tasks.runs.foreign_folders import READERS, WRITERS, family_of, is_huggingface
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.translation.config import TranslationConfig

if TYPE_CHECKING:
    from regard.tasks.language_modelling.causal import LanguageModel
    from regard.tasks.language_modelling.masked import MaskedLanguageModel
    from regard.tasks.runs.run import TrainingJob
    from regard.tasks.translation.translator import Translator


@dataclass(frozen=True, slots=True)
class Task(ABC):
    """One task."""

    config: type[TrainingConfig]
    model_field: str
    """The name of the setting that describes the model."""
    sizes: Mapping[Size, Any]
    """The values of that setting that have a name."""

    def sized(self, config: Any, size: Size) -> Any:
        return replace(config, **{self.model_field: self.sizes[size]})

    @abstractmethod
    def run(self, config: Any, **options: Any) -> str:
        """Train, and return the name of the device that it ran on; `train_run` has the options."""

    @abstractmethod
    def load(self, folder: Path | str, *, device: str = "auto") -> "Translator | LanguageModel | MaskedLanguageModel":
        """Read the best model of a run."""

    @abstractmethod
    def job(self, config: Any, folder: RunFolder, fabric: Any) -> "TrainingJob":
        """Make the training loop's job from a configuration, a prepared folder and a launched fabric."""


class _Translation(Task):
    def run(self, config: Any, **options: Any) -> str:
        from regard.tasks.translation.train import run_translation

        return run_translation(config, **options)

    def load(self, folder: Path | str, *, device: str = "auto") -> "Translator":
        from regard.tasks.translation.translator import Translator

        return Translator.load(folder, device=device)

    def job(self, config: Any, folder: RunFolder, fabric: Any) -> "TrainingJob":
        from regard.tasks.translation.train import translation_job

        return translation_job(config, folder, fabric)


class _LanguageModelling(Task):
    def run(self, config: Any, **options: Any) -> str:
        from regard.tasks.language_modelling.train import run_language_model

        return run_language_model(config, **options)

    def load(self, folder: Path | str, *, device: str = "auto") -> "LanguageModel":
        from regard.tasks.language_modelling.causal import LanguageModel

        return LanguageModel.load(folder, device=device)

    def job(self, config: Any, folder: RunFolder, fabric: Any) -> "TrainingJob":
        from regard.tasks.language_modelling.train import next_token_job

        return next_token_job(config, folder, fabric)


class _MaskedLanguageModelling(Task):
    def run(self, config: Any, **options: Any) -> str:
        from regard.tasks.language_modelling.train import run_masked_language_model

        return run_masked_language_model(config, **options)

    def load(self, folder: Path | str, *, device: str = "auto") -> "MaskedLanguageModel":
        from regard.tasks.language_modelling.masked import MaskedLanguageModel

        return MaskedLanguageModel.load(folder, device=device)

    def job(self, config: Any, folder: RunFolder, fabric: Any) -> "TrainingJob":
        from regard.tasks.language_modelling.train import masked_job

        return masked_job(config, folder, fabric)


TASKS: Mapping[str, Task] = {
    TRANSLATION: _Translation(TranslationConfig, "transformer", TRANSFORMER_SIZES),
    LANGUAGE_MODEL: _LanguageModelling(LanguageModelConfig, "model", DECODER_ONLY_SIZES),
    MASKED_LANGUAGE_MODEL: _MaskedLanguageModelling(MaskedLanguageModelConfig, "model", ENCODER_ONLY_SIZES),
}


def task_name_of(folder: Path) -> str:
    """Find the name of the task of a run folder, or of a folder in Hugging Face's format."""
    if is_huggingface(folder):
        if (family := family_of(folder)) in READERS:
            raise RunFolderError(
                f"{folder} holds a {family} model, which neither translates nor continues a text: `regard view` and "
                "`regard check` take it, and in Python regard.models.convert"
            )
        return LANGUAGE_MODEL if family in WRITERS else TRANSLATION
    name = RunFolder(folder).task()
    if name not in TASKS:
        raise RunFolderError(f"{folder} is a run of the task {name!r}; this version has {', '.join(TASKS)}")
    return name


def task_of(folder: Path) -> Task:
    """Find the task of a run folder, or of a folder in Hugging Face's format."""
    return TASKS[task_name_of(folder)]
