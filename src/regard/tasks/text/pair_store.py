"""Tokenised pairs in a folder of memory-mapped arrays, for corpora larger than memory.

tokens.npy has the tokens of source 0, target 0, source 1, target 1, ... in a row; starts.npy the place where each of
these begins, and the end of the last; about.json the fingerprints of the tokenizers, and counts. It is written last.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError, RunFolderError
from regard.files.atomic import read_checksummed, replacing, write_checksummed
from regard.tasks.text.lines import StrPath
from regard.tasks.text.tokenizers import Tokenizer

ABOUT, ADVICE = "about.json", "delete it to have it made again"
T = TypeVar("T")
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.int32]
TokenCounts = npt.NDArray[np.int32]
Append = Callable[[Any], None]
"""Adds numbers to an array that is being written."""

CHUNK_PAIRS = 4096
"""Pairs tokenised and written at a time: few enough for memory, enough for the tokenizer's threads."""


class TokenFolder:
    """A folder of tokens, of which a read loads only its pages; RunFolderError if it is not a whole one of ours."""

    counts: ClassVar[tuple[str, ...]] = ()
    """The numbers in about.json."""

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise RunFolderError(f"expected tokenised text at {path}, got no such folder; build it first")
        about = read_checksummed(self.path / ABOUT)
        numbers = [about.get(name) for name in self.counts]
        if "fingerprints" not in about or any(type(one) is not int or one < 0 for one in numbers):
            raise RunFolderError(f"{self.path / ABOUT} describes no such tokens; {ADVICE}")
        self.about = about
        self.tokens: Any = mapped(self.path / "tokens.npy", np.uint16, np.int32)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)

    @classmethod
    def open(cls, path: StrPath, *tokenizers: Tokenizer) -> Self:
        """Open a folder made with these tokenizers."""
        store = cls(path)
        if store.about["fingerprints"] != _fingerprints(tokenizers):
            raise RunFolderError(f"{path} was made with other tokenizers than these; {ADVICE}")
        return store


def mapped(path: Path, *dtypes: type[np.integer[Any]]) -> npt.NDArray[Any]:
    """A row of numbers in an .npy file, mapped but not yet read; raises RunFolderError for anything else."""
    try:
        found = np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except Exception as error:  # of any kind: numpy evaluates the header as an expression of Python
        raise RunFolderError(f"{path} is no array that can be mapped ({error!s:.200}); {ADVICE}") from None
    if found.ndim != 1 or found.dtype not in dtypes:
        raise RunFolderError(f"expected a row of whole numbers in {path}, got {found.dtype} {found.shape}; {ADVICE}")
    return found


@contextmanager
def growing(path: StrPath, **dtypes: np.dtype[Any]) -> Iterator[list[Append]]:
    """Functions that append to arrays in a folder, which are whole when the block ends; older ones stay if it fails."""
    folder = Path(path)
    folder.mkdir(exist_ok=True)
    with ExitStack() as files:
        yield [files.enter_context(_growing(folder / f"{name}.npy", dtype)) for name, dtype in dtypes.items()]
        (folder / ABOUT).unlink(missing_ok=True)


@contextmanager
def _growing(path: Path, dtype: np.dtype[Any]) -> Iterator[Append]:
    count = 0

    def append(numbers: Any) -> None:
        nonlocal count
        file.write(np.asarray(numbers, dtype).tobytes())
        count += len(numbers)

    with replacing(path) as file:
        begin = _write_header(file, dtype, 0)
        yield append
        file.seek(0)
        assert _write_header(file, dtype, count) == begin, "numpy leaves room for the digits of a length"


def _write_header(file: BinaryIO, dtype: np.dtype[Any], count: int) -> int:
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})
    return file.tell()


def write_about(path: StrPath, *tokenizers: Tokenizer, **counts: int) -> None:
    write_checksummed(Path(path, ABOUT), {"fingerprints": _fingerprints(tokenizers), **counts})


def _fingerprints(tokenizers: Iterable[Tokenizer]) -> list[str]:
    return [one.fingerprint() for one in tokenizers]


def dtype_below(count: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if count <= 2**16 else np.int32)


class TokenStore(TokenFolder):
    """Tokenised pairs in a folder. Reading pair i loads only its pages of memory.

    >>> import tempfile
    >>> from regard.tasks.text.tokenizer_recipes import Characters
    >>> tokenizer = Characters().train(["abc"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = TokenStore.build(Path(folder, "pairs"), [("ab", "c"), ("a", "bcb")], tokenizer, tokenizer)
    ...     print(len(store), store.target(1), store.source_lengths)
    2 [5 6 5] [2 1]
    """

    def __init__(self, path: StrPath) -> None:
        super().__init__(path)
        self._starts = mapped(self.path / "starts.npy", np.int64)
        self._require_order(len(self._starts) % 2 == 1)

    def __len__(self) -> int:
        return len(self._starts) // 2

    def __repr__(self) -> str:
        return f"TokenStore({str(self.path)!r}, {len(self):,} pairs, {len(self.tokens):,} tokens)"

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
            bool(np.all((begin >= 0) & (begin <= middle) & (middle <= end) & (end <= len(self.tokens))))
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
        """Tokenise pairs into a folder, chunk by chunk, and open it. An older one is replaced.

        Raises:
            DataError: a pair cannot be read.
            OSError: a file cannot be written; an older one stays as it was.
        """

        def encoded() -> Iterator[tuple[list[int], list[int]]]:
            for chunk in chunks(pairs, CHUNK_PAIRS):
                yield from zip(
                    source_tokenizer.encode_batch(source for source, _ in chunk),
                    target_tokenizer.encode_batch(target for _, target in chunk),
                    strict=True,
                )

        dtype, ends = dtype_below(max(len(source_tokenizer), len(target_tokenizer))), np.zeros(1, np.int64)
        with growing(path, tokens=dtype, starts=ends.dtype) as (add_tokens, add_starts):
            add_starts(ends)
            for chunk in chunks(encoded(), CHUNK_PAIRS):
                pieces = [tokens for pair in chunk for tokens in pair]
                add_tokens(np.fromiter(chain.from_iterable(pieces), dtype))
                ends = ends[-1] + np.cumsum([len(tokens) for tokens in pieces], dtype=np.int64)
                add_starts(ends)
        write_about(path, source_tokenizer, target_tokenizer)
        return cls(path)

    def _piece(self, index: int, side: int) -> Tokens:
        if not 0 <= index < len(self):
            raise ArgumentError(f"expected the number of a pair from 0 to {len(self) - 1}, got {index}")
        begin, end = self._starts[2 * index + side : 2 * index + side + 2].tolist()
        self._require_order(0 <= begin <= end <= len(self.tokens))
        piece: Tokens = self.tokens[begin:end]
        return piece

    def _require_order(self, is_kept: bool) -> None:
        if not is_kept:
            raise RunFolderError(f"{self.path} is damaged: it has sentences that end before they begin; {ADVICE}")


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
