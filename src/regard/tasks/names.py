"""The names of the tasks, as commands and run folders have them."""

TRANSLATION = "translation"
LANGUAGE_MODEL = "language-model"
