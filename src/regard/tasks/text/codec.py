"""The interface of tokenizers, and the tokens that are not text."""

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

    def labels(self, ids: Sequence[int]) -> list[Label]:
        """The labels of the tokens on an axis, in order; tokens of one character share a label."""

    def label_of_each(self, ids: Sequence[int]) -> list[str]:
        """One label for each token."""
