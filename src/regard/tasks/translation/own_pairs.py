"""The pairs a run was trained on, and those that it was validated on."""

from pathlib import Path
from typing import Literal

from regard.errors import ArgumentError
from regard.tasks.names import TRANSLATION
from regard.tasks.runs.foreign_folders import is_huggingface
from regard.tasks.runs.prepared import check_prepared
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.corpus import Corpus, open_corpus

RunPart = Literal["train", "valid"]


def own_corpus(run: Path, part: RunPart) -> Corpus:
    """A run's own pairs; `part` says which of them are wanted."""
    if is_huggingface(run):
        flag = "--data" if part == "train" else "--valid"
        raise ArgumentError(f"{run} is in Hugging Face's format, which has no pairs of its own: name some by {flag}")
    folder = RunFolder(run)
    check_prepared(folder)
    return open_corpus(folder.read_config(TRANSLATION, TranslationConfig), folder)
