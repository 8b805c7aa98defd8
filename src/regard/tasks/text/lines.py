"""Lines of text from a file, gzipped or not, or from standard input. Only the line feed ends a line."""

import errno
import gzip
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import BinaryIO, Generic, Literal, NamedTuple, TypeVar, cast, get_args

from regard.errors import ArgumentError, DataError
from regard.tasks.text.unicode import normalise

StrPath = str | os.PathLike[str]
BadLines = Literal["stop", "skip"]

STANDARD_INPUT = "-"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
GZIP_MAGIC = b"\x1f\x8b"
LONGEST_LINE_BYTES = 2**24
"""The longest line read. A file without line ends is not text, and must not fill the memory."""

R = TypeVar("R")
T = TypeVar("T")


class Line(NamedTuple):
    """A line of a file, without its end, and its place: "file:line"."""

    place: str
    raw: bytes


class Reader(Iterator[T], Generic[T]):
    """The items of an input, one by one, with a count of the skipped bad lines.

    `bad_lines` decides about a bad line: "stop" raises a DataError with file and line, "skip" counts it. Faults of a
    whole file (absent, cut short) always end the reading.
    """

    skipped: int
    """The number of bad lines skipped so far."""
    first_skipped: str | None
    """The fault of the first skipped line, and its place."""

    def __init__(
        self,
        records: Iterator[R],
        parse: Callable[[R], T],
        *,
        bad_lines: BadLines,
        must_hold: str | None = None,
    ) -> None:
        """Read records lazily. `must_hold` names the content required of an input without any good item."""
        if bad_lines not in get_args(BadLines):
            raise ArgumentError(f"expected bad_lines to be 'stop' or 'skip', got {bad_lines!r}")
        self.skipped = 0
        self.first_skipped = None
        self._items = self._parsed(records, parse, skip=bad_lines == "skip", must_hold=must_hold)

    def __next__(self) -> T:
        return next(self._items)

    def _parsed(
        self, records: Iterator[R], parse: Callable[[R], T], *, skip: bool, must_hold: str | None
    ) -> Iterator[T]:
        empty = True
        for record in records:
            try:
                item = parse(record)
            except DataError as error:
                if not skip:
                    raise
                self.skipped += 1
                self.first_skipped = self.first_skipped or str(error)
            else:
                empty = False
                yield item
        if empty and must_hold:
            raise DataError(f"expected {must_hold}, got {self._nothing()}; name a file that has some")

    def _nothing(self) -> str:
        return f"{self.skipped} bad lines only (the first: {self.first_skipped})" if self.skipped else "nothing"


def read_lines(path: StrPath = STANDARD_INPUT, *, bad_lines: BadLines = "stop") -> Reader[str]:
    """Lines of UTF-8 text in NFC, without their ends. An empty line is an empty text.

    Args:
        path: a file, gzipped or not, or "-" for standard input. It is opened for the first line, and read line by line.
        bad_lines: "stop" at a line that is not UTF-8, or "skip" and count it.

    Raises:
        DataError: while reading, if the file does not exist, is not UTF-8, or is gzip data cut short.
    """
    return Reader(raw_lines(path), lambda line: decoded(*line), bad_lines=bad_lines)


def decoded(place: str, raw: bytes) -> str:
    r"""The text of a line in NFC.

    >>> decoded("notes.txt:7", b"caf\xe9")
    Traceback (most recent call last):
    regard.errors.DataError: notes.txt:7: expected UTF-8, got byte 0xe9 at byte 4 of the line;
    convert the file to UTF-8
    """
    try:
        return normalise(raw.decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: expected UTF-8, got byte 0x{raw[error.start]:02x} at byte {error.start + 1} of the line; "
            "convert the file to UTF-8"
        ) from None


def raw_lines(path: StrPath) -> Iterator[Line]:
    """Lines of a file or of standard input ("-"), each with its place, before any decoding."""
    name = "standard input" if path == STANDARD_INPUT else os.fspath(path)
    place = name
    try:
        with _opened(path) as stream:
            for number in count(1):
                place = f"{name}:{number}"
                if not (raw := stream.readline(LONGEST_LINE_BYTES + 1)):
                    return
                yield Line(place, _without_end(place, raw).removeprefix(BYTE_ORDER_MARK if number == 1 else b""))
    except EOFError:
        raise DataError(f"{place}: expected more gzip data, got the end of the file; copy it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{place}: expected gzip data, got damaged ones ({error}); copy the file again") from None
    except OSError as error:
        raise DataError(why_not_read(name, error)) from error


@contextmanager
def _opened(path: StrPath) -> Iterator[BinaryIO]:
    if path == STANDARD_INPUT:
        yield sys.stdin.buffer
        return
    with Path(path).open("rb") as file:
        if file.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC):
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield cast(BinaryIO, unpacked)
        else:
            yield file


def _without_end(place: str, raw: bytes) -> bytes:
    if len(raw) > LONGEST_LINE_BYTES:
        raise DataError(
            f"{place}: expected text in lines of at most {LONGEST_LINE_BYTES:,} bytes, got a longer one; "
            "give a text file with one sentence or pair a line"
        )
    return raw.removesuffix(b"\n").removesuffix(b"\r")


def why_not_read(name: str, error: OSError) -> str:
    """Why a file could not be read, and how to proceed."""
    if isinstance(error, PermissionError) and os.path.isdir(name):  # Windows refuses to open a folder so
        error = IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    advice = {
        FileNotFoundError: "check the path",
        IsADirectoryError: "name a file in it",
        PermissionError: "allow reading it or name another file",
    }.get(type(error), "check the disk and the path")
    return f"cannot read {name} ({error.strerror}); {advice}"
