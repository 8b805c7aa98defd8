"""Which tokens are no text."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from regard.text.labels import Label


class Marks(NamedTuple):
    """The ids of the tokens around a text; the defaults are those of the tokenizers that are trained here."""

    pad_id: int = 0
    begin_id: int = 1
    end_id: int = 2


class Codec(Protocol):
    """Text to ids and back, whoever trained it."""

    @property
    def marks(self) -> Marks:
        """What stands around a text."""
        ...

    def __len__(self) -> int:
        """Number of tokens."""
        ...

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of each text, without the end mark."""
        ...

    @property
    def unknown_id(self) -> int | None:
        """The token of what the vocabulary lacks; None where tokens can write any text."""
        ...

    def surfaces(self, text: str) -> list[str]:
        """The stretch of a text that each of its tokens stands for, spaces included; empty for a mark."""
        ...

    def decode(self, ids: Sequence[int], *, unknown: Sequence[str] = ()) -> str:
        """The text of ids, without marks; `unknown` is what to write for each unknown token, U+FFFD unless given."""
        ...

    def labels(self, ids: Sequence[int]) -> list[Label]:
        """What to print for the tokens on an axis, in order."""
        ...
