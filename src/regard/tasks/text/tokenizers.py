"""Text to ids and back: tokenizers trained on the user's text, on top of the `tokenizers` library.

A tokenizer.json from outside is checked, with its dangerous settings off, so that it cannot end the process.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from regard.errors import ArgumentError, DataError, MissingExtraError, RunFolderError, needs
from regard.files.atomic import replacing
from regard.files.untrusted import parse_json
from regard.tasks.text.codec import SPACE, Label, Marks, byte_level_labels, byte_string, label_of_each, printed
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
    with needs("tokenizers", extra="train"):
        import tokenizers
    return tokenizers


def read_tokenizer(text: str) -> Any:
    """The library's tokenizer of a tokenizer.json, without padding, which could allocate without limit, and
    truncation, which can end the encoding thread."""
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
    """Make the function from a text to the form that is cut: two texts of one form are the same tokens."""
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


PAD, BOS, EOS, UNK = range(4)
OWN_MARKS = Marks(PAD, BOS, EOS)

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""The names of ids 0 to 3. No piece of text gets one of these names, and with it the id: all recipes cut between
letters and punctuation, or between all characters."""

UNKNOWN = "<unk>"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A byte in a vocabulary with byte fallback."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def is_byte_level(backend: Any) -> bool:
    """True if the pieces of a tokenizer of the library are bytes, written as printable characters."""
    decoder = backend.decoder
    # Some have it within a sequence of decoders, of which the library tells the settings alone.
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


class Tokenizer:
    """A tokenizer: text to ids and back. It is made by the `train` of a recipe, by `load`, or by `downloaded`.

    Of one that was trained here, ids 0 to 3 are padding, beginning, end and unknown. Text never becomes one of the
    first three, whatever it contains. The library encodes batches with several threads. If a process forks afterwards,
    the library warns on standard error, unless the environment sets TOKENIZERS_PARALLELISM.

    >>> from regard.tasks.text import ByteLevelBPE
    >>> tokenizer = ByteLevelBPE(vocab_size=300).train(["a rose is a rose is a rose"])
    >>> tokenizer.decode(tokenizer.encode("is a <pad> 日本 a rose?"))
    'is a <pad> 日本 a rose?'
    """

    pad_id, bos_id, eos_id, unk_id = PAD, BOS, EOS, UNK

    def __init__(self, backend: Any, marks: Marks = OWN_MARKS, *, is_ours: bool = True) -> None:
        self.marks, self.is_ours = marks, is_ours
        self._backend = backend
        if is_ours:
            # The library forgets this switch when it saves. Without it, the name of a special token in the user's text
            # would become that token.
            backend.encode_special_tokens = True
        self._byte_level = is_byte_level(backend)
        self._has_words = is_ours and isinstance(backend.normalizer, tokenizers_library().normalizers.Sequence)
        self._size: int = max(backend.get_vocab().values(), default=-1) + 1
        self._added = {number: token.special for number, token in backend.get_added_tokens_decoder().items()}

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        kind = "byte-level BPE" if self._byte_level else type(self._backend.model).__name__
        return f"Tokenizer({kind}, {len(self):,} tokens)"

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_json, (self._backend.to_str(), self.marks, self.is_ours)

    def encode(self, text: str) -> list[int]:
        """The ids of a text after NFC, without special tokens.

        Raises:
            DataError: the text holds half of a surrogate pair, or a pattern of the tokenizer gives up on it.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of each text, as by `encode`, with several threads; of a downloaded tokenizer with the tokens of its
        template before the text."""
        batch = [normalise(text) for text in texts]
        with encoding():
            found = self._backend.encode_batch_fast(batch, add_special_tokens=not self.is_ours)
        if self.is_ours:
            return [one.ids for one in found]
        # If there are only special tokens, the text is empty, and the result must be empty too.
        ids = ([] if all(one.special_tokens_mask) else one.ids for one in found)
        return [one[:-1] if one[-1:] == [self.marks.end_id] else one for one in ids]

    def normalizer(self) -> Any:
        """The library's step before a text is cut; None if there is none."""
        return self._backend.normalizer

    @cached_property
    def unknown_id(self) -> int | None:
        """The token for text outside the vocabulary; None for a byte-level tokenizer, which has no gaps."""
        if self._byte_level or self.is_ours:
            return None if self._byte_level else UNK
        model = parse_json(self._backend.to_str())["model"]
        name = model.get("unk_token")
        found: int | None = model.get("unk_id") if name is None else self._backend.token_to_id(name)
        return None if model.get("byte_fallback") else found

    @cached_property
    def lowercases(self) -> bool:
        """True if text is lowercased before it is tokenised, so that decoded text is in lower case too.

        >>> from regard.tasks.text import Words
        >>> tokenizer = Words(lowercase=True).train(["to be"])
        >>> tokenizer.lowercases, tokenizer.decode(tokenizer.encode("TO be"))
        (True, 'to be')
        """
        return reads_lower_case(self._backend)

    def surfaces(self, text: str) -> list[str]:
        """The stretch of text of each token; a word has the space before it, and a token of a template has none.

        Where stretches overlap (of the bytes of a character; or a token for the beginning of a word includes the word's
        first letter), the later token gets the whole overlap.

        >>> from regard.tasks.text import Words
        >>> tokenizer = Words().train(["to be"])
        >>> tokenizer.surfaces("to see, or be"), tokenizer.encode("to see, or be")
        (['to', ' see', ',', ' or', ' be'], [5, 3, 3, 3, 4])
        """
        text, found, next_first = normalise(text), [], len(text)
        with encoding():
            encoded = self._backend.encode(text, add_special_tokens=not self.is_ours)
        for first, end in reversed(encoded.offsets):
            found.append(text[first : min(end, max(first, next_first))])
            next_first = first if end > first else next_first
        return found[::-1]

    def decode(self, ids: Sequence[int], *, unknown: Sequence[str] = ()) -> str:
        """The text of ids, without padding, beginning and end. An unknown token is written as U+FFFD.

        Byte sequences that form no character, possible in a model's output, also become U+FFFD.

        Args:
            ids: tokens.
            unknown: the texts for the unknown tokens, in order, instead of U+FFFD.

        Raises:
            ArgumentError: an id is not in the vocabulary.

        >>> from regard.tasks.text import Words
        >>> tokenizer = Words().train(["to be"])
        >>> tokenizer.decode([5, 3], unknown=["see"])
        'to see'
        """
        # Byte-level text has no unknown token. If a model predicts it anyway, nothing is written.
        drops_unknown = self.is_ours and self._byte_level
        kept = [i for i in self._checked(ids) if i not in self.marks and not (drops_unknown and i == UNK)]
        if unknown:
            space, words = " " if self._has_words else "", iter(unknown)
            pieces = [
                space + next(words, REPLACEMENT).strip(space) if i == self.unknown_id else self._backend.id_to_token(i)
                for i in kept
                if self.is_ours or i == self.unknown_id or not self._added.get(i)
            ]
            text = str(self._backend.decoder.decode(pieces) if self._backend.decoder else " ".join(pieces))
        else:
            text = str(self._backend.decode(kept, skip_special_tokens=not self.is_ours))
        return text if self.is_ours else text.strip()

    def bytes_of(self, token: int) -> bytes:
        """The UTF-8 bytes a token adds to a text. A byte-level token may be only a part of a character.

        The bytes of several tokens together are the text of `decode`, except that words begin with a space.

        Raises:
            ArgumentError: the id is not in the vocabulary.

        >>> from regard.tasks.text import ByteLevelBPE
        >>> tokenizer = ByteLevelBPE(vocab_size=260).train(["no merges here"])
        >>> [tokenizer.bytes_of(token) for token in tokenizer.encode("é")]
        [b'\\xc3', b'\\xa9']
        """
        piece: str = self._backend.id_to_token(self._checked([token])[0]) or ""
        if self.is_ours and token == UNK and not self._byte_level:
            piece = f" {REPLACEMENT}" if self._has_words else REPLACEMENT
        elif token in self.marks or self._added.get(token):
            return b""
        elif self._byte_level and token not in self._added:
            return byte_string(piece)
        elif not self.is_ours:
            piece = piece.replace(SPACE, " ")
            return bytes.fromhex(piece[3:5]) if _BYTE.fullmatch(piece) else piece.encode()
        return piece.encode()

    def labels(self, ids: Sequence[int]) -> list[Label]:
        """The labels of the tokens of a text on an axis, in order; no token is left out.

        Returns:
            Labels, a word with the space before it, each with its range of tokens, both ends inclusive. There is one
            label for each token, but one for byte-level pieces of one character.

        Raises:
            ArgumentError: an id is not in the vocabulary.

        >>> from regard.tasks.text import ByteLevelBPE
        >>> tokenizer = ByteLevelBPE(vocab_size=260).train(["no merges here"])
        >>> tokenizer.labels([*tokenizer.encode("a 日"), EOS])
        [Label(text='a', pieces=(0, 0)), Label(text='␣', pieces=(1, 1)),
         Label(text='日', pieces=(2, 4)), Label(text='<eos>', pieces=(5, 5))]
        """
        if self._byte_level:
            return byte_level_labels(*self._pieces(ids))
        return [Label(text, (n, n)) for n, text in enumerate(self.label_of_each(ids))]

    def label_of_each(self, ids: Sequence[int]) -> list[str]:
        """One label for each token, also for a part of a character.

        Raises:
            ArgumentError: an id is not in the vocabulary.
        """
        pieces, special = self._pieces(ids)
        if self.is_ours and not self._byte_level:  # whole words, or characters
            return [printed(piece).removeprefix(" ") for piece in pieces]
        return label_of_each(pieces, special, byte_level=self._byte_level)

    def _pieces(self, ids: Sequence[int]) -> tuple[list[str], list[bool]]:
        pieces = [self._backend.id_to_token(i) or UNKNOWN for i in self._checked(ids)]
        return pieces, [bool(self._added.get(i)) or i in self.marks for i in ids]

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

    @classmethod
    def downloaded(cls, path: Path, marks: Marks) -> "Tokenizer":
        """Read a tokenizer.json of another program. It puts its template's tokens before a text; the caller adds the
        end token.

        Raises:
            RunFolderError: the file is absent, or no tokenizer.
        """
        try:
            return cls(read_tokenizer(path.read_text(encoding="utf-8")), marks, is_ours=False)
        except MissingExtraError:
            raise
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{path} is not a tokenizer that can be read ({error})") from None

    def _checked(self, ids: Sequence[int]) -> Sequence[int]:
        # A downloaded model may have more rows than its tokenizer has tokens.
        if self.is_ours and len(ids) and not 0 <= min(ids) <= max(ids) < self._size:
            raise ArgumentError(
                f"expected ids from 0 to {self._size - 1}, got ids from {min(ids)} to {max(ids)}; "
                "decode with the tokenizer that the model was trained with"
            )
        return ids


def _from_json(text: str, marks: Marks = OWN_MARKS, is_ours: bool = True) -> Tokenizer:
    backend = read_tokenizer(text)
    if is_ours and tuple(map(backend.id_to_token, range(len(SPECIAL_TOKENS)))) != SPECIAL_TOKENS:
        raise ValueError(f"expected its first tokens to be {', '.join(SPECIAL_TOKENS)}")
    return Tokenizer(backend, marks, is_ours=is_ours)
