"""Texts to try a model with, from the held-out data that its run keeps."""

from pathlib import Path

from regard.errors import RegardError
from regard.tasks.language_modelling.corpus import open_text
from regard.tasks.names import TRANSLATION
from regard.tasks.pictures.validation_examples import short_pairs
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.pair_store import TokenStore
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.corpus import load_tokenizers

EXAMPLES, READ_TOKENS, SHOWN_CHARACTERS = 3, 400, 48


def example_texts(folder: Path, task: str) -> list[str]:
    """Sentences that a translator was not trained on, or beginnings of lines of a language model's held-out text.

    >>> example_texts(Path("nowhere"), TRANSLATION)
    []
    """
    try:
        found = _sentences(RunFolder(folder)) if task == TRANSLATION else _beginnings(RunFolder(folder))
    except (RegardError, OSError):  # the run keeps none, or is in Hugging Face's format
        return []
    return list(dict.fromkeys(text.strip() for text in found if text.strip()))[:EXAMPLES]


def _sentences(run: RunFolder) -> list[str]:
    tokenizers = load_tokenizers(run.read_config(TRANSLATION, TranslationConfig), run)
    valid = TokenStore.open(run.data / "valid.tokens", *tokenizers)
    return [tokenizers[0].decode(valid.source(index).tolist()) for index in short_pairs(valid, 4 * EXAMPLES)]


def _beginnings(run: RunFolder) -> list[str]:
    corpus, found = open_text(run), []
    for start in (number * len(corpus.valid.tokens) // EXAMPLES for number in range(EXAMPLES)):
        lines = corpus.tokenizer.decode(corpus.valid.tokens[start : start + READ_TOKENS].tolist()).split("\n")
        line = max(lines[1:-1] or lines, key=len)  # the first and the last may be pieces of lines
        cut = line[:SHOWN_CHARACTERS]
        found.append(line if cut == line else cut.rpartition(" ")[0] or cut)
    return found
