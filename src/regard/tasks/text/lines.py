"""Lines of text from a file, packed or not, or from standard input. Only the line feed ends a line."""

import errno
import io
import lzma
import os
import sys
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

from regard.errors import ArgumentError, DataError
from regard.tasks.text.gate import HEAD_BYTES, Packing, packing_of, refuse_foreign
from regard.tasks.text.unicode import normalise

StrPath = str | os.PathLike[str]
BadLines = Literal["stop", "skip"]

STANDARD_INPUT = "-"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
DAMAGED = (zlib.error, lzma.LZMAError, zipfile.BadZipFile)
"""The errors of packed data, beside OSErrors without a number and the error of zstd."""
LONGEST_LINE_BYTES = 2**24
"""The longest line read. A file without line ends is not text, and must not fill the memory."""

A = TypeVar("A")
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

    first_skipped: str | None
    """The fault of the first skipped line, and its place."""

    def __init__(
        self, records: Iterator[Callable[[], T]], *, bad_lines: BadLines, must_hold: str | None = None
    ) -> None:
        """Call records lazily. `must_hold` names the content required of an input without any good item."""
        if bad_lines not in get_args(BadLines):
            raise ArgumentError(f"expected bad_lines to be 'stop' or 'skip', got {bad_lines!r}")
        self._bad = array("q")
        self.first_skipped = None
        self._items = self._parsed(records, skip=bad_lines == "skip", must_hold=must_hold)

    def __next__(self) -> T:
        return next(self._items)

    @property
    def skipped(self) -> int:
        """The number of bad lines skipped so far."""
        return len(self._bad)

    @property
    def told(self) -> list[str]:
        """A line about the skipped lines so far; none if there are none."""
        return [f"{self.skipped:,} bad lines left out; the first: {self.first_skipped}"] if self._bad else []

    def with_gaps(self, answers: Iterable[A]) -> Iterator[A | None]:
        """The answers to all items, with None in the places of skipped lines: answer n is about line n."""
        number = gaps = 0
        for answer in answers:
            while gaps < len(self._bad) and self._bad[gaps] == number:
                yield None
                number, gaps = number + 1, gaps + 1
            yield answer
            number += 1
        yield from [None] * (len(self._bad) - gaps)

    def _parsed(self, records: Iterator[Callable[[], T]], *, skip: bool, must_hold: str | None) -> Iterator[T]:
        empty = True
        for number, parse in enumerate(records):
            try:
                item = parse()
            except DataError as error:
                if not skip:
                    raise
                self._bad.append(number)
                self.first_skipped = self.first_skipped or str(error)
            else:
                empty = False
                yield item
        if empty and must_hold:
            raise DataError(f"expected {must_hold}, got {self._nothing()}; name a file that has some")

    def _nothing(self) -> str:
        return f"{self.skipped} bad lines only (the first: {self.first_skipped})" if self._bad else "nothing"


def read_lines(path: StrPath = STANDARD_INPUT, *, bad_lines: BadLines = "stop") -> Reader[str]:
    """Lines of UTF-8 text in NFC, without their ends. An empty line is an empty text.

    Args:
        path: a file, packed or not, or "-" for standard input. It is opened for the first line, and read line by line.
        bad_lines: "stop" at a line that is not UTF-8, or "skip" and count it.

    Raises:
        DataError: while reading, if the file does not exist, is not UTF-8, or is packed data cut short.
    """
    return Reader((partial(decoded, *line) for line in Lines(path)), bad_lines=bad_lines)


def decoded(place: str, raw: bytes) -> str:
    r"""The text of a line in NFC.

    >>> decoded("notes.txt:7", b"caf\xe9")
    Traceback (most recent call last):
    regard.errors.DataError: notes.txt:7: expected UTF-8, got byte 0xe9 at byte 4;
    convert the text to UTF-8
    """
    if b"\0" in raw:
        at = raw.index(0) + 1
        raise DataError(f"{place}: expected text, got a NUL byte at byte {at}; take it out (tr -d '\\000' does)")
    try:
        return normalise(raw.decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: expected UTF-8, got byte 0x{raw[error.start]:02x} at byte {error.start + 1}; "
            "convert the text to UTF-8"
        ) from None


def refuse_long(place: str) -> None:
    """Refuse a line longer than the longest that is read."""
    raise DataError(
        f"{place}: expected text in lines of at most {LONGEST_LINE_BYTES:,} bytes, got a longer one; "
        "give a text file with one sentence or pair a line"
    )


class Lines(Iterator[Line]):
    """Lines of a file or of standard input ("-"), each with its place, before any decoding.

    It is opened once, for its head or for its first line.

    Args:
        path: the file, packed or not.
        too_long: is called with the place of a line of more than 16 MiB, which is cut there unless this raises.
    """

    def __init__(self, path: StrPath = STANDARD_INPUT, *, too_long: Callable[[str], None] = refuse_long) -> None:
        self.name = "standard input" if path == STANDARD_INPUT else os.fspath(path)
        self._parts = self._read(path, too_long)

    def __next__(self) -> Line:
        _ = self.head
        line: Line = next(self._parts)
        return line

    @cached_property
    def head(self) -> bytes:
        """The first bytes, unpacked; those that are there if the input is a pipe."""
        head: bytes = next(self._parts)
        return head

    def _read(self, path: StrPath, too_long: Callable[[str], None]) -> Iterator[Any]:
        place, packed_by = self.name, ""
        try:
            with ExitStack() as opened:
                stream = _opened(path, opened)
                while (packing := packing_of(stream.peek(HEAD_BYTES))) is not None:
                    packed_by = packing.name
                    stream = opened.enter_context(_unpacked(packing, stream, self.name))
                head = stream.peek(HEAD_BYTES)
                refuse_foreign(head, self.name)
                yield head.removeprefix(BYTE_ORDER_MARK)
                for number in count(1):
                    place = f"{self.name}:{number}"
                    if not (raw := stream.readline(LONGEST_LINE_BYTES + 1)):
                        return
                    if len(raw) > LONGEST_LINE_BYTES:
                        too_long(place)
                        while (byte := stream.peek(1)[:1]) and 0x80 <= byte[0] < 0xC0:  # the rest of a character
                            raw += stream.read(1)
                    raw = raw.removesuffix(b"\n").removesuffix(b"\r")
                    yield Line(place, raw.removeprefix(BYTE_ORDER_MARK if number == 1 else b""))
        except EOFError:
            raise DataError(
                f"{place}: expected more {packed_by} data, got the end of the file; copy it again"
            ) from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise DataError(why_not_read(self.name, error)) from error
            if packed_by and (isinstance(error, (OSError, *DAMAGED)) or type(error).__name__ == "ZstdError"):
                raise DataError(
                    f"{place}: expected {packed_by} data, got damaged ones ({error}); copy the file again"
                ) from None
            raise


def _unpacked(packing: Packing, stream: Any, name: str) -> Any:
    try:
        return packing.open(stream)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def _opened(path: StrPath, opened: ExitStack) -> Any:
    """A stream with `peek`."""
    if path != STANDARD_INPUT:
        return opened.enter_context(Path(path).open("rb", HEAD_BYTES))
    stream: Any = sys.stdin.buffer
    if not hasattr(stream, "peek"):
        stream = io.BufferedReader(stream)
        opened.callback(_release, stream)
    return stream


def _release(stream: Any) -> None:
    """Take a reader off standard input, which it would close."""
    with suppress(ValueError):  # it is closed already
        stream.detach()


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
