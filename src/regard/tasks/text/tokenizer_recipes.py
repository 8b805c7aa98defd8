"""Recipes of tokenizers: byte-level BPE, words and characters, learnt from text."""

import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import Thread, current_thread, main_thread
from types import ModuleType
from typing import Any, Protocol, TypeVar

from regard.errors import ArgumentError, DataError
from regard.tasks.text.tokenizers import REPLACEMENT, SPECIAL_TOKENS, UNK, Tokenizer, tokenizers_library
from regard.tasks.text.unicode import MARKS, bounded, has_unspaced, is_word, normalise, segments
from regard.tasks.training.interrupts import handled
from regard.tensors.ranges import require_at_least

BYTE_ALPHABET_SIZE = 256
PIECES = (
    rf"'(?:s|t|re|ve|m|ll|d)| ?\p{{L}}[\p{{L}}{MARKS}]*| ?\p{{N}}[\p{{N}}{MARKS}]*| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
)
"""The stretches of text that no merge crosses: those of GPT-2, but marks stay with their letters."""
MOST_PIECES = 2**24
"""The largest vocabulary of a byte-level BPE, for all of which its trainer takes room before it reads: 1.5 GiB."""


class Recipe(Protocol):
    """A method to make a tokenizer from text."""

    __slots__ = ()

    def normalizer(self) -> Any:
        """The library's step before a text is cut; None if there is none."""

    def train(self, texts: Iterable[str]) -> Tokenizer:
        """Learn a vocabulary from texts, which are read once.

        Raises:
            DataError: there is no text.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteLevelBPE(Recipe):
    """Pieces learnt by merging frequent neighbours, starting with bytes. It can write any text without loss.

    >>> len(ByteLevelBPE(vocab_size=8000).train(["too little text for so large a vocabulary"])) < 8000
    True
    """

    vocab_size: int = 8000
    """The size of the vocabulary, 2**24 at most: 4 special tokens, 256 bytes, and as many merges as the text allows."""
    lowercase: bool = False
    """Whether all text is read in lower case."""

    def __post_init__(self) -> None:
        require_at_least(BYTE_ALPHABET_SIZE + len(SPECIAL_TOKENS), vocab_size=self.vocab_size)
        if self.vocab_size > MOST_PIECES:
            raise ArgumentError(
                f"vocab_size of a byte-level BPE must be at most {MOST_PIECES:,}, got {self.vocab_size:,}"
            )

    def normalizer(self) -> Any:
        return _lowercase(self.lowercase)

    def train(self, texts: Iterable[str]) -> Tokenizer:
        library = tokenizers_library()
        backend = library.Tokenizer(library.models.BPE())
        if self.lowercase:
            backend.normalizer = self.normalizer()
        cutters = library.pre_tokenizers
        by_words = cutters.Split(library.Regex(PIECES), "isolated")
        backend.pre_tokenizer = cutters.Sequence([by_words, cutters.ByteLevel(add_prefix_space=False, use_regex=False)])
        backend.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            min_frequency=2,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        return _trained(backend, trainer, (part for text in texts for part in _apart(text)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Words(Recipe):
    """Words that are separated by spaces and punctuation. Several spaces count as one space.

    A word includes the space before it, so that decoding restores the punctuation. For scripts without spaces
    (Chinese, Japanese, Thai), use another recipe.

    >>> tokenizer = Words().train(["to be, or not to be"])
    >>> tokenizer.decode(tokenizer.encode("not  to see, or be"))
    'not to �, or be'
    """

    vocab_size: int = 30_000
    """The largest size of the vocabulary, including the 4 special tokens; the most frequent words are kept."""
    lowercase: bool = False
    """Whether all text is read in lower case."""

    def __post_init__(self) -> None:
        require_at_least(len(SPECIAL_TOKENS) + 1, vocab_size=self.vocab_size)

    def normalizer(self) -> Any:
        """Lower case, if that is wanted; one space between words, and one before the first."""
        library = tokenizers_library()
        normalizers = library.normalizers
        cases = [_lowercase(True)] if self.lowercase else []
        spaces = [normalizers.Replace(library.Regex(r"\s+"), " "), normalizers.Strip(), normalizers.Prepend(" ")]
        return normalizers.Sequence([*cases, *spaces])

    def train(self, texts: Iterable[str]) -> Tokenizer:
        library = tokenizers_library()
        decoders = library.decoders
        backend = _word_level(library, rf" ?\w[\w{MARKS}]*| ?[^\w\s]+")
        backend.normalizer = self.normalizer()
        backend.decoder = decoders.Sequence(
            [decoders.Replace(SPECIAL_TOKENS[UNK], f" {REPLACEMENT}"), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        return _trained(backend, _word_level_trainer(library, self.vocab_size), texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Characters(Recipe):
    """One token for each character (a Unicode code point), including spaces.

    >>> tokenizer = Characters().train(["abc"])
    >>> tokenizer.decode(tokenizer.encode("cabin"))
    'cab��'
    """

    vocab_size: int = 8000
    """The largest size of the vocabulary, including the 4 special tokens; the most frequent characters are kept."""
    lowercase: bool = False
    """Whether all text is read in lower case."""

    def __post_init__(self) -> None:
        require_at_least(len(SPECIAL_TOKENS) + 1, vocab_size=self.vocab_size)

    def normalizer(self) -> Any:
        return _lowercase(self.lowercase)

    def train(self, texts: Iterable[str]) -> Tokenizer:
        library = tokenizers_library()
        decoders = library.decoders
        backend = _word_level(library, r"[\s\S]")
        if self.lowercase:
            backend.normalizer = self.normalizer()
        backend.decoder = decoders.Sequence([decoders.Replace(SPECIAL_TOKENS[UNK], REPLACEMENT), decoders.Fuse()])
        return _trained(backend, _word_level_trainer(library, self.vocab_size), texts)


def recipe(name: str, vocab_size: int, *, lowercase: bool = False) -> Recipe:
    """The recipe with this name: "bpe", "words" or "characters".

    Raises:
        ArgumentError: there is no such recipe, or the vocabulary is too small for it.

    >>> recipe("bpe", 4000)
    ByteLevelBPE(vocab_size=4000, lowercase=False)
    """
    recipes: dict[str, Callable[..., Recipe]] = {"bpe": ByteLevelBPE, "words": Words, "characters": Characters}
    if name not in recipes:
        raise ArgumentError(f"expected a tokenizer out of {', '.join(recipes)}, got {name!r}")
    return recipes[name](vocab_size=vocab_size, lowercase=lowercase)


def _lowercase(is_wanted: bool) -> Any:
    return tokenizers_library().normalizers.Lowercase() if is_wanted else None


def _word_level(library: ModuleType, pattern: str) -> Any:
    backend = library.Tokenizer(library.models.WordLevel({}, unk_token=SPECIAL_TOKENS[UNK]))
    backend.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(pattern), "isolated")
    return backend


def _word_level_trainer(library: ModuleType, vocab_size: int) -> Any:
    return library.trainers.WordLevelTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )


def _apart(text: str) -> Iterator[str]:
    """A text cut between words with no space between them, so that no merge joins two words of Chinese or Thai."""
    if not has_unspaced(text):
        yield text
        return
    part, is_behind_word = "", False
    for segment in segments(normalise(text)):
        if is_behind_word and is_word(segment):
            yield part
            part = ""
        part, is_behind_word = part + segment, is_word(segment)
    yield part


def _trained(backend: Any, trainer: Any, texts: Iterable[str]) -> Tokenizer:
    in_background(partial(backend.train_from_iterator, _some_text(texts), trainer))
    return Tokenizer(backend)


def _some_text(texts: Iterable[str]) -> Iterator[str]:
    some = False
    for text in map(normalise, texts):
        some = some or bool(text.strip())
        yield from bounded(text)
    if not some:
        raise DataError(
            "expected text to train a tokenizer on, got none; hand over at least one line that is not empty"
        )


T = TypeVar("T")
LOOKING_S = 0.1
"""Seconds between two looks for a signal."""


def in_background(work: Callable[[], T]) -> T:
    """The result of some work in another thread, so that the handler of a signal runs soon. If it raises, the work is
    left to itself. It is called in this loop: within a callback of Python's garbage collection, the error of a handler
    is lost."""
    if current_thread() is not main_thread():
        return work()
    results: list[T] = []
    errors: list[BaseException] = []
    signals: list[int] = []

    def do() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=do, daemon=True)
    thread.start()
    while thread.is_alive():
        with handled(lambda number, _: signals.append(number), signal.SIGINT, signal.SIGTERM):
            while thread.is_alive() and not signals:
                thread.join(LOOKING_S)
        while signals:
            signal.raise_signal(signals.pop())
    if errors:
        raise errors[0]
    return results[0]
