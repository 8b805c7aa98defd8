"""What is trained and used: translation. A run folder holds everything that a trained model needs."""

from regard.tasks.config import TranslationConfig as TranslationConfig
from regard.tasks.translation import train as train
from regard.tasks.translator import Translation as Translation
from regard.tasks.translator import Translator as Translator

__all__ = ["Translation", "TranslationConfig", "Translator", "train"]
