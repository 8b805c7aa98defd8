"""Tokens in a memory-mapped file, for corpora larger than memory: pairs and running text. The file holds the tokens in
a row, optional positions of sentences, and a footer (`regard.files.mapped`)."""

from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np

from regard.errors import RunFolderError
from regard.files.mapped import ADVICE, Footer, open_mapped
from regard.tasks.text.lines import StrPath
from regard.tasks.text.tokenizers import Tokenizer


class TokenFooter(Footer, Protocol):
    """The description of a file of tokens."""

    @property
    def dtype(self) -> str: ...

    @property
    def fingerprints(self) -> list[str]:
        """The fingerprints of the file's tokenizers."""


F = TypeVar("F", bound=TokenFooter)


class TokenFile(Generic[F]):
    """A file of tokens. Reading some loads only their pages of memory."""

    footer_type: ClassVar[type[Any]]

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        footer: F
        self.raw, footer = open_mapped(self.path, self.footer_type)
        self.footer = footer

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)

    @classmethod
    def open(cls, path: StrPath, *tokenizers: Tokenizer) -> Self:
        """Open a file made with these tokenizers."""
        file = cls(path)
        if file.footer.fingerprints != fingerprints(*tokenizers):
            raise RunFolderError(f"{path} was made with other tokenizers than these; {ADVICE}")
        return file


def fingerprints(*tokenizers: Tokenizer) -> list[str]:
    """The fingerprint of each tokenizer."""
    return [one.fingerprint() for one in tokenizers]


def dtype_below(count: int) -> np.dtype[Any]:
    """The dtype for integers below `count`."""
    return np.dtype(np.uint16 if count <= 2**16 else np.int32)
