"""The tasks: translation and language modelling. A run folder holds all that a trained model needs."""

from typing import TYPE_CHECKING

from regard.lazy import on_demand

if TYPE_CHECKING:
    from regard.tasks import exports as exports
    from regard.tasks import generation as generation
    from regard.tasks import text as text
    from regard.tasks import training as training
    from regard.tasks.language_modelling.causal import LanguageModel as LanguageModel
    from regard.tasks.language_modelling.config import LanguageModelConfig as LanguageModelConfig
    from regard.tasks.language_modelling.train import train_language_model as train_language_model
    from regard.tasks.training.fit_config import FitConfig as FitConfig
    from regard.tasks.translation.config import TranslationConfig as TranslationConfig
    from regard.tasks.translation.results import Translation as Translation
    from regard.tasks.translation.train import train_translation as train_translation
    from regard.tasks.translation.translation_model import AlignmentOf as AlignmentOf
    from regard.tasks.translation.translation_model import Request as Request
    from regard.tasks.translation.translator import Translator as Translator
else:
    __getattr__, __dir__, __all__ = on_demand(__name__, drawn_by="regard.tasks.pictures.display")
