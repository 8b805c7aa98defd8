"""Text to ids and back: tokenizers trained on the user's text, on top of the `tokenizers` library."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from regard.errors import ArgumentError, DataError, RunFolderError
from regard.files.atomic import replacing
from regard.tasks.text.codec import Marks
from regard.tasks.text.labels import Label, byte_level_labels, byte_string, printed
from regard.tasks.text.tokenizer_files import encoding, read_tokenizer, reads_lower_case, tokenizers_library
from regard.tasks.text.unicode import normalise

PAD, BOS, EOS, UNK = range(4)

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""The names of ids 0 to 3. No piece of text gets one of these names, and with it the id: all recipes cut between
letters and punctuation, or between all characters."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_ALPHABET_SIZE = 256
MOST_PIECES = 2**24
"""The largest vocabulary of a byte-level BPE: its trainer allocates for all of it before it reads, here 1.5 GiB."""


def is_byte_level(backend: Any) -> bool:
    """True if the pieces of a tokenizer of the library are bytes, written as printable characters."""
    return isinstance(backend.decoder, tokenizers_library().decoders.ByteLevel)


class Tokenizer:
    """A trained tokenizer: text to ids and back. It is made by the `train` of a recipe, or by `load`.

    Ids 0 to 3 are padding, beginning, end and unknown. Text never becomes one of the first three, whatever it
    contains. The library encodes batches with several threads. If a process forks afterwards, the library warns
    on standard error, unless the environment sets TOKENIZERS_PARALLELISM.

    >>> tokenizer = ByteLevelBPE(vocab_size=300).train(["a rose is a rose is a rose"])
    >>> tokenizer.decode(tokenizer.encode("is a <pad> 日本 a rose?"))
    'is a <pad> 日本 a rose?'
    """

    pad_id, bos_id, eos_id, unk_id = PAD, BOS, EOS, UNK
    marks = Marks(PAD, BOS, EOS)

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        # The library forgets this switch when it saves. Without it, the name of a special token in the user's text
        # would become that token.
        backend.encode_special_tokens = True
        self._byte_level = is_byte_level(backend)
        self._has_words = isinstance(backend.normalizer, tokenizers_library().normalizers.Sequence)
        self._lowercases = reads_lower_case(backend)
        self._size: int = backend.get_vocab_size()

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        kind = "byte-level BPE" if self._byte_level else type(self._backend.model).__name__
        return f"Tokenizer({kind}, {len(self):,} tokens)"

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_json, (self._backend.to_str(),)

    def encode(self, text: str) -> list[int]:
        """The ids of a text after NFC, without special tokens.

        Raises:
            DataError: the text holds half of a surrogate pair, or a pattern of the tokenizer gives up on it.
        """
        text = normalise(text)
        with encoding():
            return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of each text, as by `encode`, with several threads."""
        batch = [normalise(text) for text in texts]
        with encoding():
            return [encoded.ids for encoded in self._backend.encode_batch_fast(batch, add_special_tokens=False)]

    @property
    def unknown_id(self) -> int | None:
        """The token for text outside the vocabulary; None for a byte-level tokenizer, which has no gaps."""
        return None if self._byte_level else UNK

    @property
    def has_merges(self) -> bool:
        """True for a BPE, which supports dropout of merges.

        >>> ByteLevelBPE().train(["to be"]).has_merges, Words().train(["to be"]).has_merges
        (True, False)
        """
        return isinstance(self._backend.model, tokenizers_library().models.BPE)

    @property
    def lowercases(self) -> bool:
        """True if text is lowercased before it is tokenised, so that decoded text is in lower case too.

        >>> tokenizer = Words(lowercase=True).train(["to be"])
        >>> tokenizer.lowercases, tokenizer.decode(tokenizer.encode("TO be"))
        (True, 'to be')
        """
        return self._lowercases

    def surfaces(self, text: str) -> list[str]:
        """The stretch of text of each token; a word has the space before it.

        >>> tokenizer = Words().train(["to be"])
        >>> tokenizer.surfaces("to see, or be"), tokenizer.encode("to see, or be")
        (['to', ' see', ',', ' or', ' be'], [5, 3, 3, 3, 4])
        """
        text = normalise(text)
        with encoding():
            encoded = self._backend.encode(text, add_special_tokens=False)
        return [text[first:end] for first, end in encoded.offsets]

    def decode(self, ids: Sequence[int], *, unknown: Sequence[str] = ()) -> str:
        """The text of ids, without padding, beginning and end. An unknown token is written as U+FFFD.

        Byte sequences that form no character, possible in a model's output, also become U+FFFD.

        Args:
            ids: tokens.
            unknown: the texts for the unknown tokens, in order, instead of U+FFFD.

        Raises:
            ArgumentError: an id is not in the vocabulary.

        >>> tokenizer = Words().train(["to be"])
        >>> tokenizer.decode([5, 3], unknown=["see"])
        'to see'
        """
        # Byte-level text has no unknown token. If a model predicts it anyway, nothing is written.
        dropped = UNK if self._byte_level else EOS
        kept = [i for i in self._checked(ids) if i > dropped]
        if not unknown:
            return str(self._backend.decode(kept, skip_special_tokens=False))
        space, words = " " if self._has_words else "", iter(unknown)
        pieces = [
            space + next(words, REPLACEMENT).strip(space) if i == UNK else self._backend.id_to_token(i) for i in kept
        ]
        return str(self._backend.decoder.decode(pieces))

    def bytes_of(self, token: int) -> bytes:
        """The UTF-8 bytes a token adds to a text. A byte-level token may be only a part of a character.

        The bytes of several tokens together are the text of `decode`, except that words begin with a space.

        Raises:
            ArgumentError: the id is not in the vocabulary.

        >>> tokenizer = ByteLevelBPE(vocab_size=260).train(["no merges here"])
        >>> [tokenizer.bytes_of(token) for token in tokenizer.encode("é")]
        [b'\\xc3', b'\\xa9']
        """
        self._checked([token])
        if token <= EOS or (token == UNK and self._byte_level):
            return b""
        piece: str = self._backend.id_to_token(token)
        if self._byte_level:
            return byte_string(piece)
        if token == UNK:
            piece = f" {REPLACEMENT}" if self._has_words else REPLACEMENT
        return piece.encode()

    def labels(self, ids: Sequence[int]) -> list[Label]:
        """The labels of the tokens of a text on an axis, in order; no token is left out.

        Returns:
            Labels without surrounding spaces, each with its range of tokens, both ends inclusive. There is one label
            for each token, but one for byte-level pieces of one character.

        Raises:
            ArgumentError: an id is not in the vocabulary.

        >>> tokenizer = ByteLevelBPE(vocab_size=260).train(["no merges here"])
        >>> tokenizer.labels([*tokenizer.encode("a 日"), EOS])
        [Label(text='a', pieces=(0, 0)), Label(text='␣', pieces=(1, 1)),
         Label(text='日', pieces=(2, 4)), Label(text='<eos>', pieces=(5, 5))]
        """
        pieces = [self._backend.id_to_token(i) for i in self._checked(ids)]
        if self._byte_level:
            return byte_level_labels(pieces, [i <= UNK for i in ids])
        return [Label(printed(piece), (n, n)) for n, piece in enumerate(pieces)]

    def piece(self, number: int) -> str:
        """The token of an id as the vocabulary writes it: a name shared with other programs, not text.

        Raises:
            ArgumentError: the id is not in the vocabulary.
        """
        return str(self._backend.id_to_token(self._checked([number])[0]))

    def to_json(self) -> str:
        """The content of `save`, on one line."""
        return str(self._backend.to_str())

    def fingerprint(self) -> str:
        """64 hexadecimal digits, different for different tokenizers."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer as one tokenizer.json, completely or not at all."""
        with replacing(path) as file:
            file.write(self._backend.to_str(pretty=True).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read a tokenizer.json of `save`.

        Raises:
            RunFolderError: the file is absent, cut short, or written by another program.
        """
        try:
            return _from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise RunFolderError(
                f"expected a tokenizer at {path}, but cannot read it ({error.strerror}); "
                "name a run folder that `regard train` made"
            ) from error
        except ValueError as error:
            raise RunFolderError(
                f"{path} is not a tokenizer that regard saved ({error}); copy it again or name another run folder"
            ) from error

    def _checked(self, ids: Sequence[int]) -> Sequence[int]:
        if len(ids) and not 0 <= min(ids) <= max(ids) < self._size:
            raise ArgumentError(
                f"expected ids from 0 to {self._size - 1}, got ids from {min(ids)} to {max(ids)}; "
                "decode with the tokenizer that the model was trained with"
            )
        return ids


def _from_json(text: str) -> Tokenizer:
    backend = read_tokenizer(text)
    if tuple(map(backend.id_to_token, range(len(SPECIAL_TOKENS)))) != SPECIAL_TOKENS:
        raise ValueError(f"expected its first tokens to be {', '.join(SPECIAL_TOKENS)}")
    return Tokenizer(backend)


class Recipe(Protocol):
    """A method to make a tokenizer from text."""

    def train(self, texts: Iterable[str]) -> Tokenizer: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteLevelBPE:
    """Pieces learnt by merging frequent neighbours, starting with bytes. It can write any text without loss.

    >>> len(ByteLevelBPE(vocab_size=8000).train(["too little text for so large a vocabulary"])) < 8000
    True
    """

    vocab_size: int = 8000
    """The size of the vocabulary, 2**24 at most: 4 special tokens, 256 bytes, and as many merges as the text allows."""
    min_count: int = 2
    """How often two neighbours must occur to be merged."""
    lowercase: bool = False
    """Whether all text is read in lower case."""

    def __post_init__(self) -> None:
        _check_at_least("vocab_size of a byte-level BPE", self.vocab_size, BYTE_ALPHABET_SIZE + len(SPECIAL_TOKENS))
        _check_at_least("min_count", self.min_count, 1)
        if self.vocab_size > MOST_PIECES:
            raise ArgumentError(
                f"vocab_size of a byte-level BPE must be at most {MOST_PIECES:,}, got {self.vocab_size:,}"
            )

    def train(self, texts: Iterable[str]) -> Tokenizer:
        """Learn the merges from texts, read once.

        Raises:
            DataError: there is no text.
        """
        library = tokenizers_library()
        backend = library.Tokenizer(library.models.BPE())
        if self.lowercase:
            backend.normalizer = library.normalizers.Lowercase()
        backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            min_frequency=self.min_count,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        return _trained(backend, trainer, texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """Words separated by spaces and punctuation. Several spaces count as one.

    A word includes the space before it, so that decoding restores the punctuation. For scripts without spaces
    (Chinese, Japanese, Thai), use another recipe.

    >>> tokenizer = Words().train(["to be, or not to be"])
    >>> tokenizer.decode(tokenizer.encode("not  to see, or be"))
    'not to �, or be'
    """

    vocab_size: int = 30_000
    """The largest size of the vocabulary, including the 4 special tokens; the most frequent words are kept."""
    min_count: int = 1
    """How often a word must occur to be in the vocabulary."""
    lowercase: bool = False
    """Whether all text is read in lower case."""

    def __post_init__(self) -> None:
        _check_at_least("vocab_size of words", self.vocab_size, len(SPECIAL_TOKENS) + 1)
        _check_at_least("min_count", self.min_count, 1)

    def train(self, texts: Iterable[str]) -> Tokenizer:
        """Count the words of texts, read once.

        Raises:
            DataError: there is no text.
        """
        library = tokenizers_library()
        normalizers, decoders = library.normalizers, library.decoders
        backend = _word_level(library, r" ?\w+| ?[^\w\s]+")
        cases = [normalizers.Lowercase()] if self.lowercase else []
        spaces = [normalizers.Replace(library.Regex(r"\s+"), " "), normalizers.Strip(), normalizers.Prepend(" ")]
        backend.normalizer = normalizers.Sequence([*cases, *spaces])
        backend.decoder = decoders.Sequence(
            [decoders.Replace(SPECIAL_TOKENS[UNK], f" {REPLACEMENT}"), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        return _trained(backend, _word_level_trainer(library, self.vocab_size, self.min_count), texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Characters:
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
        _check_at_least("vocab_size of characters", self.vocab_size, len(SPECIAL_TOKENS) + 1)

    def train(self, texts: Iterable[str]) -> Tokenizer:
        """Count the characters of texts, read once.

        Raises:
            DataError: there is no text.
        """
        library = tokenizers_library()
        decoders = library.decoders
        backend = _word_level(library, r"[\s\S]")
        if self.lowercase:
            backend.normalizer = library.normalizers.Lowercase()
        backend.decoder = decoders.Sequence([decoders.Replace(SPECIAL_TOKENS[UNK], REPLACEMENT), decoders.Fuse()])
        return _trained(backend, _word_level_trainer(library, self.vocab_size, 1), texts)


def recipe(name: str, vocab_size: int, *, lowercase: bool = False) -> Recipe:
    """The recipe with this name: "bpe", "words" or "characters".

    Raises:
        ArgumentError: there is no such recipe, or the vocabulary is too small for it.

    >>> recipe("bpe", 4000)
    ByteLevelBPE(vocab_size=4000, min_count=2, lowercase=False)
    """
    recipes = {"bpe": ByteLevelBPE, "words": Words, "characters": Characters}
    if name not in recipes:
        raise ArgumentError(f"expected a tokenizer out of {', '.join(recipes)}, got {name!r}")
    made: Recipe = recipes[name](vocab_size=vocab_size, lowercase=lowercase)
    return made


def _word_level(library: ModuleType, pattern: str) -> Any:
    backend = library.Tokenizer(library.models.WordLevel({}, unk_token=SPECIAL_TOKENS[UNK]))
    backend.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(pattern), "isolated")
    return backend


def _word_level_trainer(library: ModuleType, vocab_size: int, min_count: int) -> Any:
    return library.trainers.WordLevelTrainer(
        vocab_size=vocab_size,
        min_frequency=min_count,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )


def _trained(backend: Any, trainer: Any, texts: Iterable[str]) -> Tokenizer:
    backend.train_from_iterator(_some_text(texts), trainer)
    return Tokenizer(backend)


def _some_text(texts: Iterable[str]) -> Iterator[str]:
    some = False
    for text in map(normalise, texts):
        some = some or bool(text.strip())
        yield text
    if not some:
        raise DataError(
            "expected text to train a tokenizer on, got none; hand over at least one line that is not empty"
        )


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ArgumentError(f"{name} must be at least {least}, got {value}; raise it to {least} or more")
