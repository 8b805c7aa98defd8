"""Policies of simultaneous translation: when the next word may be written, and when one more must be read first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from regard.errors import ArgumentError


@runtime_checkable
class ReadWritePolicy(Protocol):
    """Decides about each word a model would write while its source has not ended. Spaces part words."""

    looks_at_attention: bool
    """Whether `accepts` needs the alignment of the word."""

    def most_words(self, read: int) -> int | None:
        """How many words may be written in all when so many source words were read; None: as many as are accepted."""

    def accepts(self, aligned: Sequence[int], read: int) -> bool:
        """Whether a word may be written.

        Args:
            aligned: for each token of the word, the number of the source word (from 0) that it attends to most; empty
                if the policy does not look at attention.
            read: how many source words were read.
        """


@dataclass(frozen=True, slots=True)
class AlignAtt:
    """A word is written if none of its tokens attends most to one of the last words read.

    The newest words may still change their meaning; words aligned with older ones are safe.

    Source: Papi et al. 2023 (arXiv:2305.11408), section 3: their frames are of sound, these are words.

    >>> AlignAtt(frames=2).accepts([0, 1], read=4), AlignAtt(frames=2).accepts([0, 2], read=4)
    (True, False)
    """

    frames: int = 2
    """f, at least 1: how many of the newest source words are too new to be translated. More wait longer."""
    looks_at_attention = True

    def __post_init__(self) -> None:
        if self.frames < 1:
            raise ArgumentError(f"frames must be at least 1, got {self.frames}")

    def most_words(self, read: int) -> int | None:
        """No limit."""
        return None

    def accepts(self, aligned: Sequence[int], read: int) -> bool:
        """Whether all of the word's tokens are aligned with words before the last `frames`."""
        return all(word < read - self.frames for word in aligned)


@dataclass(frozen=True, slots=True)
class WaitK:
    """One word is written for each read, after the first k - 1.

    Target word t is written when min(k + t - 1, all) source words were read.

    Source: Ma et al. 2019 (arXiv:1810.08398), equation 4; for a model trained on whole sentences this is
    their test-time wait-k.

    >>> [WaitK(3).most_words(read) for read in range(6)]
    [0, 0, 0, 1, 2, 3]
    """

    k: int = 3
    """At least 1."""
    looks_at_attention = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ArgumentError(f"k must be at least 1, got {self.k}")

    def most_words(self, read: int) -> int | None:
        """One for each word from the k-th on."""
        return max(read - self.k + 1, 0)

    def accepts(self, aligned: Sequence[int], read: int) -> bool:
        """Any word within the number."""
        return True
