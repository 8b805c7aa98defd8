"""A tokenizer.json from outside: checked, with its dangerous settings off, so that it cannot end the process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from regard.errors import DataError, needs
from regard.files.untrusted import parse_json
from regard.tasks.text.unicode import normalise

LONGEST_TEXT = 10_000
"""The most characters a step of a tokenizer may insert: more would explode on every text."""
MOST_PARTS = 1_000
"""The most parts of a step."""
SPARE_IDS = 1 << 20
"""How far the ids may reach beyond the number of tokens: a table of all ids is made from them."""
STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
AFFIXES = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")


def tokenizers_library() -> ModuleType:
    """The `tokenizers` package; raises MissingExtraError if it is not installed."""
    with needs("tokenizers", extra="train"):
        import tokenizers
    return tokenizers


def read_tokenizer(text: str) -> Any:
    """The library's tokenizer of a tokenizer.json, without its padding and truncation.

    Padding of a fixed length would allocate without limit, and truncation can end the encoding thread.
    """
    library = tokenizers_library()
    with _as_value_errors():
        backend = library.Tokenizer.from_str(text)
        backend.no_padding()
        backend.no_truncation()
        ids = backend.get_vocab().values()
        steps = {name: step for name in STEPS if (step := getattr(backend, name)) is not None}
        described = {name: parse_json(step.__getstate__()) for name, step in steps.items()}
    if ids and max(ids) >= len(ids) + SPARE_IDS:
        raise ValueError(f"expected its {len(ids)} tokens to have ids near 0, got the id {max(ids)}")
    affixes = {name: getattr(backend.model, name, None) for name in AFFIXES}
    for name, value in {**described, **affixes}.items():
        _check(name, value)
    return backend


def reads_lower_case(backend: Any) -> bool:
    def lowers(step: Any) -> bool:  # of its settings: the library's steps within a step within a step have no end
        is_bert = step["type"] == "BertNormalizer" and bool(step["lowercase"])
        return step["type"] == "Lowercase" or is_bert or any(map(lowers, step.get("normalizers", ())))

    return backend.normalizer is not None and lowers(parse_json(backend.normalizer.__getstate__()))


def read_as(normalizer: Any) -> Callable[[str], str]:
    """Make a function from a text to that which a tokenizer with this normalizer cuts: two texts of one reading are the
    same tokens."""
    return lambda text: normalise(text) if normalizer is None else str(normalizer.normalize_str(normalise(text)))


@contextmanager
def encoding() -> Iterator[None]:
    """Turn a panic of the library (a pattern needs too many steps for a text), no `Exception`, into a DataError."""
    try:
        yield
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise DataError(f"the tokenizer cannot cut a text into tokens ({error}): use another tokenizer.json") from None


@contextmanager
def _as_value_errors() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise ValueError(str(error)) from error  # the library raises nothing more precise


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


def _check(name: str, value: Any) -> None:
    """Refuse oversized texts and lists, except the table of SentencePiece's normalisation."""
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise ValueError(f"its {name} holds a text of {len(value):,} characters, above the {LONGEST_TEXT:,} allowed")
    if isinstance(value, dict | list):
        if len(value) > MOST_PARTS:
            raise ValueError(f"its {name} has {len(value):,} parts, above the {MOST_PARTS:,} allowed")
        parts = value.items() if isinstance(value, dict) else ((name, part) for part in value)
        for key, part in parts:
            if key != "precompiled_charsmap":
                _check(name, part)
