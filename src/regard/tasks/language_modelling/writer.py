"""Writers for a `LanguageModel` in place of its own search."""

from collections.abc import Generator, Sequence
from typing import Protocol

from regard.tasks.generation.filters import Filter


class Writer(Protocol):
    """Another runtime with the same model."""

    def begin(self, seed: int) -> None:
        """Begin to draw for some texts, by the random numbers of a seed."""

    def write(
        self, contexts: Sequence[Sequence[int]], *, most: int, filters: Sequence[Filter]
    ) -> Generator[tuple[int, int], None, None]:
        """Continue texts of one length by up to `most` tokens; the caller may stop at any of them.

        Yields:
            The number of a text and its next token; an end mark is the last of its text.
        """
