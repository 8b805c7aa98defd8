"""A tokenizer.json of anybody's: what it says is checked or switched off, so that it cannot end the process."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from regard.errors import DataError, MissingExtraError
from regard.files.untrusted import parse_json

LONGEST_TEXT = 10_000
"""The most characters that a step of a tokenizer may write by itself; more would run away on every text."""
MOST_PARTS = 1_000
"""The most parts of which a step may consist."""
SPARE_IDS = 1 << 20
"""How far the ids may reach beyond the number of tokens: a table of all ids is made from them."""
STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
AFFIXES = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")


def tokenizers_library() -> ModuleType:
    """The `tokenizers` package.

    Raises:
        MissingExtraError: the package is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("tokenizers", extra="text") from error
    return tokenizers


def read_tokenizer(text: str) -> Any:
    """The library's tokenizer that a tokenizer.json describes, without its padding and truncation.

    Padding of a fixed length would take memory without limit, and truncation can end the thread that encodes.

    Raises:
        ValueError: the text describes no tokenizer, or one that would run away.
        MissingExtraError: tokenizers is not installed.
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
    """Whether a tokenizer of the library brings all text to lower case before it cuts it."""
    normalizers = tokenizers_library().normalizers

    def lowers(step: Any) -> bool:
        if isinstance(step, normalizers.Sequence):
            return any(map(lowers, step))
        is_bert = isinstance(step, normalizers.BertNormalizer)
        return isinstance(step, normalizers.Lowercase) or (is_bert and bool(step.lowercase))

    return lowers(backend.normalizer)


@contextmanager
def encoding() -> Iterator[None]:
    """Name the tokenizer where the library gives up on a text.

    Raises:
        DataError: the library panicked, for which it raises no `Exception`: a pattern of a tokenizer.json can need
            more steps for a text than the library takes.
    """
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
    """The class is made inside the library's extension, and no name leads to it."""
    return type(error).__name__ == "PanicException"


def _check(name: str, value: Any) -> None:
    """Refuse texts and lists that no tokenizer has, but for the table of SentencePiece's normalisation."""
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise ValueError(f"its {name} holds a text of {len(value):,} characters, above the {LONGEST_TEXT:,} allowed")
    if isinstance(value, dict | list):
        if len(value) > MOST_PARTS:
            raise ValueError(f"its {name} has {len(value):,} parts, above the {MOST_PARTS:,} allowed")
        parts = value.items() if isinstance(value, dict) else ((name, part) for part in value)
        for key, part in parts:
            if key != "precompiled_charsmap":
                _check(name, part)
