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

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without marks."""
        ...

    def labels(self, ids: Sequence[int]) -> list[Label]:
        """What to print for the tokens on an axis, in order."""
        ...
