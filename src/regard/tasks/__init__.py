"""What is trained and used: translation and language models. A run folder holds all that a trained model needs."""

from regard.tasks.alignments import AlignmentOf as AlignmentOf
from regard.tasks.config import TranslationConfig as TranslationConfig
from regard.tasks.filler import Filler as Filler
from regard.tasks.language_model import train_language_model as train_language_model
from regard.tasks.language_model import train_masked_language_model as train_masked_language_model
from regard.tasks.requests import Request as Request
from regard.tasks.text_config import LanguageModelConfig as LanguageModelConfig
from regard.tasks.text_config import MaskedLanguageModelConfig as MaskedLanguageModelConfig
from regard.tasks.translation import train as train
from regard.tasks.translator import Translation as Translation
from regard.tasks.translator import Translator as Translator
from regard.tasks.writer import Writer as Writer

__all__ = [
    "AlignmentOf",
    "Filler",
    "LanguageModelConfig",
    "MaskedLanguageModelConfig",
    "Request",
    "Translation",
    "TranslationConfig",
    "Translator",
    "Writer",
    "train",
    "train_language_model",
    "train_masked_language_model",
]
