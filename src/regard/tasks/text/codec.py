"""The interface of tokenizers, and the tokens that are not text."""

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from regard.tasks.text.labels import Label

UNPREDICTED = -100
"""The target where nothing is predicted: the id of no token in any vocabulary."""


class Marks(NamedTuple):
    """The ids of the special tokens around a text. The defaults are those of the tokenizers trained here."""

    pad_id: int = 0
    begin_id: int = 1
    end_id: int = 2


class Codec(Protocol):
    """Text to ids and back, for any tokenizer."""

    @property
    def marks(self) -> Marks:
        """The special tokens around a text."""

    def __len__(self) -> int: ...

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of each text, without the end token."""

    @property
    def unknown_id(self) -> int | None:
        """The token for text outside the vocabulary; None for tokenizers without gaps."""

    @property
    def lowercases(self) -> bool:
        """True if text is lowercased before it is tokenised, so that decoded text is in lower case too."""

    def surfaces(self, text: str) -> list[str]:
        """The stretch of text of each token, including spaces; empty for a special token."""

    def decode(self, ids: Sequence[int], *, unknown: Sequence[str] = ()) -> str:
        """The text of ids, without special tokens. `unknown` has the text for each unknown token, else it is U+FFFD."""

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token adds to a text, in UTF-8; they may be only a part of a character."""

    def labels(self, ids: Sequence[int]) -> list[Label]:
        """The labels of the tokens on an axis, in order; tokens of one character share a label."""

    def label_of_each(self, ids: Sequence[int]) -> list[str]:
        """One label for each token."""


def unknown_texts(codec: Codec, text: str, ids: Sequence[int]) -> list[str]:
    """The stretches of a text whose tokens stand for text outside the vocabulary; `ids` are those of the text.

    >>> from regard.tasks.text import Words
    >>> tokenizer = Words().train(["to be"])
    >>> unknown_texts(tokenizer, "to see", tokenizer.encode("to see"))
    ['see']
    """
    if codec.unknown_id is None or codec.unknown_id not in ids:
        return []
    surfaces = codec.surfaces(text)  # those of the template's end are more
    return [surface.strip() for token, surface in zip(ids, surfaces, strict=False) if token == codec.unknown_id]


def finished_text(codec: Codec, ids: Sequence[int], *, unknown: Sequence[str] = ()) -> str:
    """The text of ids that may end within a character, as at a limit of tokens: the part of it is left out.

    >>> from regard.tasks.text import ByteLevelBPE
    >>> tokenizer = ByteLevelBPE(vocab_size=260).train(["no merges here"])
    >>> finished_text(tokenizer, tokenizer.encode("né")[:-1])
    'n'
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in ids:
        decoder.decode(codec.bytes_of(token))
    text = codec.decode(ids, unknown=unknown)
    for _ in decoder.getstate()[0]:  # libraries write one U+FFFD for the part, or one for each of its bytes
        text = text.removesuffix("\N{REPLACEMENT CHARACTER}")
    return text
