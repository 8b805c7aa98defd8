"""The pairs a run was trained on, and those that it was validated on."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regard.errors import ArgumentError
from regard.tasks.names import TRANSLATION
from regard.tasks.runs.foreign_folders import is_huggingface
from regard.tasks.runs.prepared import check_prepared
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.corpus import Corpus, open_corpus

if TYPE_CHECKING:
    from regard.tasks.translation.translator import Translator


RunPart = Literal["train", "valid"]


def own_corpus(run: Path, part: RunPart) -> Corpus:
    """A run's own pairs; `part` says which of them are wanted."""
    if is_huggingface(run):
        flag = "--data" if part == "train" else "--valid"
        raise ArgumentError(f"{run} is in Hugging Face's format, which has no pairs of its own: name some by {flag}")
    folder = RunFolder(run)
    check_prepared(folder)
    return open_corpus(folder.read_config(TRANSLATION, TranslationConfig), folder)


def texts_of(
    translator: "Translator", sources: Sequence[Sequence[Any]], targets: Sequence[Sequence[Any]]
) -> list[tuple[str, str]]:
    """The texts of some pairs of tokens."""
    source, target = translator.source_tokenizer.decode, translator.target_tokenizer.decode
    return [(source([*map(int, a)]), target([*map(int, b)])) for a, b in zip(sources, targets, strict=True)]
