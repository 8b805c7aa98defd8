"""Text to ids and back: tokenizers trained on the user's text, on top of the `tokenizers` library."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError, RunFolderError
from regard.files.atomic import replacing
from regard.tasks.text.codec import Marks
from regard.tasks.text.labels import Label, byte_level_labels, byte_string, label_of_each, printed
from regard.tasks.text.tokenizer_files import encoding, read_tokenizer, reads_lower_case, tokenizers_library
from regard.tasks.text.unicode import normalise

PAD, BOS, EOS, UNK = range(4)

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""The names of ids 0 to 3. No piece of text gets one of these names, and with it the id: all recipes cut between
letters and punctuation, or between all characters."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def is_byte_level(backend: Any) -> bool:
    """True if the pieces of a tokenizer of the library are bytes, written as printable characters."""
    decoder = backend.decoder
    # Some have it within a sequence of decoders, of which the library tells the settings alone.
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


class Tokenizer:
    """A trained tokenizer: text to ids and back. It is made by the `train` of a recipe, or by `load`.

    Ids 0 to 3 are padding, beginning, end and unknown. Text never becomes one of the first three, whatever it
    contains. The library encodes batches with several threads. If a process forks afterwards, the library warns
    on standard error, unless the environment sets TOKENIZERS_PARALLELISM.

    >>> from regard.tasks.text import ByteLevelBPE
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

    def normalizer(self) -> Any:
        """The library's step before a text is cut; None if there is none."""
        return self._backend.normalizer

    @property
    def unknown_id(self) -> int | None:
        """The token for text outside the vocabulary; None for a byte-level tokenizer, which has no gaps."""
        return None if self._byte_level else UNK

    @property
    def lowercases(self) -> bool:
        """True if text is lowercased before it is tokenised, so that decoded text is in lower case too.

        >>> from regard.tasks.text import Words
        >>> tokenizer = Words(lowercase=True).train(["to be"])
        >>> tokenizer.lowercases, tokenizer.decode(tokenizer.encode("TO be"))
        (True, 'to be')
        """
        return self._lowercases

    def surfaces(self, text: str) -> list[str]:
        """The stretch of text of each token; a word has the space before it.

        >>> from regard.tasks.text import Words
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

        >>> from regard.tasks.text import Words
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

        >>> from regard.tasks.text import ByteLevelBPE
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
            pieces = [self._backend.id_to_token(i) for i in self._checked(ids)]
            return byte_level_labels(pieces, [i <= UNK for i in ids])
        return [Label(text, (n, n)) for n, text in enumerate(self.label_of_each(ids))]

    def label_of_each(self, ids: Sequence[int]) -> list[str]:
        """One label for each token, also for a part of a character.

        Raises:
            ArgumentError: an id is not in the vocabulary.
        """
        pieces = [self._backend.id_to_token(i) for i in self._checked(ids)]
        if not self._byte_level:  # whole words, or characters
            return [printed(piece).removeprefix(" ") for piece in pieces]
        return label_of_each(pieces, [i <= UNK for i in ids], byte_level=True)

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
