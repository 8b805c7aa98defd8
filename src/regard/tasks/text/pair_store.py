"""Tokenised pairs in a memory-mapped file, for corpora larger than memory.

The file holds the tokens of source 0, target 0, source 1, target 1, ... in a row; then their start positions; then a
footer in JSON that describes these; then the footer's length and a signature.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError, RunFolderError
from regard.files.atomic import replacing
from regard.files.mapped import ADVICE, Footer, item_bytes, open_mapped, write_footer
from regard.tasks.text.lines import StrPath
from regard.tasks.text.tokenizers import Tokenizer


class TokenFooter(Footer, Protocol):
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
    return [one.fingerprint() for one in tokenizers]


def dtype_below(count: int) -> np.dtype[Any]:
    """The dtype for integers below `count`."""
    return np.dtype(np.uint16 if count <= 2**16 else np.int32)


T = TypeVar("T")
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.int32]
TokenCounts = npt.NDArray[np.int32]

CHUNK_PAIRS = 4096
"""Pairs tokenised and written at a time: few enough for memory, enough for the tokenizer's threads."""


@dataclass(frozen=True, slots=True)
class PairFooter:
    dtype: str
    tokens_bytes: int
    pairs: int
    fingerprints: list[str]

    @property
    def numbers_bytes(self) -> int:
        """The bytes of the tokens, and of the start positions of the sentences."""
        if self.tokens_bytes % item_bytes(self.dtype):
            raise ValueError(f"{self.tokens_bytes} bytes are no whole number of tokens")
        return _aligned(self.tokens_bytes) + 8 * (2 * self.pairs + 1)


class TokenStore(TokenFile[PairFooter]):
    """Tokenised pairs in a file. Reading pair i loads only its pages of memory.

    >>> from regard.tasks.text.tokenizer_recipes import Characters
    >>> tokenizer = Characters().train(["abc"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "pairs.tokens")
    ...     store = TokenStore.build(path, [("ab", "c"), ("a", "bcb")], tokenizer, tokenizer)
    ...     print(len(store), store.target(1), store.source_lengths)
    2 [5 6 5] [2 1]
    """

    footer_type = PairFooter

    def __init__(self, path: StrPath) -> None:
        super().__init__(path)
        tokens_bytes, starts_bytes = self.footer.tokens_bytes, 8 * (2 * self.footer.pairs + 1)
        starts_at = _aligned(tokens_bytes)
        self._tokens = self.raw[:tokens_bytes].view(self.footer.dtype)
        self._starts = self.raw[starts_at : starts_at + starts_bytes].view(np.int64)

    def __len__(self) -> int:
        return self.footer.pairs

    def __repr__(self) -> str:
        return f"TokenStore({str(self.path)!r}, {len(self):,} pairs, {len(self._tokens):,} tokens)"

    @property
    def source_lengths(self) -> TokenCounts:
        """The number of tokens of each source, without special tokens; shape (pairs,), computed at each call."""
        return self.lengths(slice(None))[0]

    @property
    def target_lengths(self) -> TokenCounts:
        """The number of tokens of each target, without special tokens; shape (pairs,), computed at each call."""
        return self.lengths(slice(None))[1]

    def lengths(self, rows: slice | npt.NDArray[np.integer]) -> tuple[TokenCounts, TokenCounts]:
        """The number of tokens of each source and target of some pairs, without special tokens; shape (rows,) each.
        Raises RunFolderError if a sentence ends before it begins, in a damaged file."""
        begins, middles, ends = self._starts[:-1:2], self._starts[1::2], self._starts[2::2]
        begin, middle, end = begins[rows], middles[rows], ends[rows]
        self._require_order(
            bool(np.all((begin >= 0) & (begin <= middle) & (middle <= end) & (end <= len(self._tokens))))
        )
        return (middle - begin).astype(np.int32), (end - middle).astype(np.int32)

    def source(self, index: int) -> Tokens:
        """The tokens of a source, shape (source_lengths[index],), read-only."""
        return self._piece(index, 0)

    def target(self, index: int) -> Tokens:
        """The tokens of a target, shape (target_lengths[index],), read-only."""
        return self._piece(index, 1)

    @classmethod
    def build(
        cls, path: StrPath, pairs: Iterable[tuple[str, str]], source_tokenizer: Tokenizer, target_tokenizer: Tokenizer
    ) -> "TokenStore":
        """Tokenise pairs into a file, chunk by chunk, and open it. An older file is replaced.

        Raises:
            DataError: a pair cannot be read.
            OSError: the file cannot be written; an older one stays as it was.
        """
        tokenizers = source_tokenizer, target_tokenizer

        def encoded() -> Iterator[tuple[list[int], list[int]]]:
            for chunk in chunks(pairs, CHUNK_PAIRS):
                yield from zip(
                    source_tokenizer.encode_batch(source for source, _ in chunk),
                    target_tokenizer.encode_batch(target for _, target in chunk),
                    strict=True,
                )

        dtype = dtype_below(max(map(len, tokenizers)))
        with replacing(path) as file, tempfile.TemporaryFile(dir=Path(path).parent) as starts:
            ends = np.zeros(1, np.int64)
            starts.write(ends.tobytes())
            for chunk in chunks(encoded(), CHUNK_PAIRS):
                pieces = [tokens for pair in chunk for tokens in pair]
                file.write(np.fromiter(chain.from_iterable(pieces), dtype).tobytes())
                ends = ends[-1] + np.cumsum([len(tokens) for tokens in pieces], dtype=np.int64)
                starts.write(ends.tobytes())
            _finish(file, starts, dtype.str, fingerprints(*tokenizers))
        return cls(path)

    def _piece(self, index: int, side: int) -> Tokens:
        if not 0 <= index < self.footer.pairs:
            raise ArgumentError(f"expected the number of a pair from 0 to {len(self) - 1}, got {index}")
        begin, end = self._starts[2 * index + side : 2 * index + side + 2].tolist()
        self._require_order(0 <= begin <= end <= len(self._tokens))
        piece: Tokens = self._tokens[begin:end]
        return piece

    def _require_order(self, is_kept: bool) -> None:
        if not is_kept:
            raise RunFolderError(f"{self.path} is damaged: it has sentences that end before they begin; {ADVICE}")


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Items in lists of a size; the last may be shorter."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _aligned(size_bytes: int) -> int:
    """A size rounded up to a multiple of 8, to align 8-byte integers."""
    return -(-size_bytes // 8) * 8


def _finish(file: IO[bytes], starts: IO[bytes], dtype: str, made_with: list[str]) -> None:
    tokens_bytes = file.tell()
    pairs = (starts.tell() // 8 - 1) // 2
    file.write(bytes(_aligned(tokens_bytes) - tokens_bytes))
    starts.seek(0)
    shutil.copyfileobj(starts, file)
    write_footer(file, PairFooter(dtype, tokens_bytes, pairs, made_with))
