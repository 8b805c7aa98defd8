"""Lines of text from a file, packed or not, or from standard input. Only the line feed ends a line.

The ending of a file's name says its form and its packing. No look at the content does.
"""

import bz2
import codecs
import errno
import gzip
import lzma
import os
import re
import sys
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from itertools import count
from os import PathLike, fspath
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import IO, Any, Generic, Literal, NamedTuple, TypeVar, cast, get_args

from regard.errors import ArgumentError, DataError, MissingExtraError
from regard.tasks.text.unicode import normalise

PairFormat = Literal["tsv", "tsv-extra", "csv", "csv-no-header", "jsonl", "tmx", "aligned"]
RunningTextFormat = Literal["text", "jsonl"]
DataFormat = Literal["tsv", "tsv-extra", "csv", "csv-no-header", "jsonl", "tmx", "aligned", "text"]
"""The forms of pairs and of running text."""

STANDARD_INPUT = "-"
ENDINGS = MappingProxyType(
    {".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".tmx": "tmx", ".txt": "text"}
)
LANGUAGE = re.compile(r"\.[a-z]{2}([-_][A-Za-z]{2,4})?")
"""The ending of lines in one language: `.en`, `.pt_BR`."""


class Packing(NamedTuple):
    name: str
    open: Callable[[Any], IO[bytes]]


def _zstd(stream: IO[bytes]) -> IO[bytes]:
    for name in ("compression.zstd", "backports.zstd"):  # the first is Python's, from 3.14 on
        with suppress(ImportError):
            unpacked: IO[bytes] = import_module(name).ZstdFile(stream)
            return unpacked
    raise MissingExtraError("backports.zstd", extra="train")


PACKINGS = MappingProxyType(
    {
        ".gz": Packing("gzip", lambda stream: cast(IO[bytes], gzip.GzipFile(fileobj=stream))),
        ".bz2": Packing("bzip2", bz2.BZ2File),
        ".xz": Packing("xz", lzma.LZMAFile),
        ".zst": Packing("zstd", _zstd),
    }
)


def packing_of(name: str | PathLike[str]) -> Packing | None:
    return PACKINGS.get(Path(name).suffix)


def unpacked_name(name: str | PathLike[str]) -> Path:
    """A file's name without the ending of its packing.

    >>> unpacked_name("pairs.tsv.gz").name
    'pairs.tsv'
    """
    return Path(name).with_suffix("") if packing_of(name) else Path(name)


def form_of(name: str | PathLike[str], forms: Collection[str]) -> str:
    """The form of a file out of some, by the ending of its name. Standard input is lines of text.

    Among pairs, lines of text are one side of aligned files.

    Raises:
        ArgumentError: the ending says none of them.
    """
    ending = unpacked_name(name).suffix
    form = "text" if fspath(name) == STANDARD_INPUT or LANGUAGE.fullmatch(ending) else ENDINGS.get(ending)
    if form == "text" and "aligned" in forms:
        form = "aligned"
    if form is None or form not in forms:
        known = [one for one, of in ENDINGS.items() if of in forms or (of == "text" and "aligned" in forms)]
        raise ArgumentError(
            f"expected a name that ends in {', '.join(known)} or in a language's two letters (.en), packed "
            f"({', '.join(PACKINGS)}) or not, got {fspath(name)}: say its form by --data-format"
        )
    return form


StrPath = str | os.PathLike[str]
BadLines = Literal["stop", "skip"]

OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""The byte order marks of other encodings; the mark of UTF-16 begins that of UTF-32."""
DAMAGED = (zlib.error, lzma.LZMAError)
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
        self,
        records: Iterator[Callable[[], T]],
        *,
        bad_lines: BadLines,
        must_hold: str | None = None,
        files: Sequence["Lines"] = (),
    ) -> None:
        if bad_lines not in get_args(BadLines):
            raise ArgumentError(f"expected bad_lines to be 'stop' or 'skip', got {bad_lines!r}")
        self._bad, self._files = array("q"), files
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
        """Sentences about the files, and one about the skipped lines so far if there are any."""
        notes = [note for file in self._files for note in file.notes]
        return notes + [f"{self.skipped:,} bad lines left out; the first: {self.first_skipped}"] * bool(self._bad)

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
            got = f"{self.skipped} bad lines only (the first: {self.first_skipped})" if self._bad else "nothing"
            raise DataError(f"expected {must_hold}, got {got}; name a file that has some")


def read_lines(path: StrPath = STANDARD_INPUT, *, bad_lines: BadLines = "stop") -> Reader[str]:
    """Lines of UTF-8 text in NFC, without their ends. An empty line is an empty text.

    Args:
        path: a file, packed or not by its ending, or "-" for standard input. It is opened for the first line, and read
            line by line.
        bad_lines: "stop" at a line that is not UTF-8, or "skip" and count it.

    Raises:
        DataError: while reading, if the file does not exist, is not UTF-8, or is packed data cut short.
    """
    return Reader((partial(decoded, *line) for line in Lines(path)), bad_lines=bad_lines)


def decoded(place: str, raw: bytes) -> str:
    r"""The text of a line in NFC."""
    if b"\0" in raw:
        at = raw.index(0) + 1
        raise DataError(
            f"{place}: expected text in UTF-8, got a NUL byte at byte {at}; take it out (tr -d '\\000' does), or "
            "convert UTF-16 (iconv -f UTF-16 -t UTF-8 does)"
        )
    try:
        return normalise(raw.decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: expected UTF-8, got byte 0x{raw[error.start]:02x} at byte {error.start + 1}; "
            "convert the text to UTF-8"
        ) from None


def refuse_long(place: str) -> None:
    raise DataError(
        f"{place}: expected text in lines of at most {LONGEST_LINE_BYTES:,} bytes, got a longer one; "
        "give a text file with one sentence or pair a line"
    )


class Lines(Iterator[Line]):
    """Lines of a file or of standard input ("-"), each with its place, before any decoding. It is opened once.

    The ending of the file's name says how it is packed; standard input is not. `too_long` is called with the place of a
    line of more than 16 MiB, which is cut there unless this raises.
    """

    def __init__(self, path: StrPath = STANDARD_INPUT, *, too_long: Callable[[str], None] = refuse_long) -> None:
        self.name = "standard input" if path == STANDARD_INPUT else os.fspath(path)
        self.notes: list[str] = []
        """Sentences about the file for its reader's `told`."""
        self._lines = self._read(path, too_long)

    def __next__(self) -> Line:
        return next(self._lines)

    def _read(self, path: StrPath, too_long: Callable[[str], None]) -> Iterator[Line]:
        place, packing = self.name, packing_of(path)
        try:
            with ExitStack() as opened:
                is_given = path == STANDARD_INPUT
                stream: Any = sys.stdin.buffer if is_given else opened.enter_context(Path(path).open("rb"))
                if packing is not None:
                    stream = opened.enter_context(packing.open(stream))
                for number in count(1):
                    place = f"{self.name}:{number}"
                    if not (raw := stream.readline(LONGEST_LINE_BYTES + 1)):
                        return
                    if number == 1:
                        raw = _without_mark(raw, self.name)
                    if len(raw) > LONGEST_LINE_BYTES:
                        too_long(place)
                        while (byte := stream.peek(1)[:1]) and 0x80 <= byte[0] < 0xC0:  # the rest of a character
                            raw += stream.read(1)
                    yield Line(place, raw.removesuffix(b"\n").removesuffix(b"\r"))
        except EOFError:
            raise DataError(
                f"{place}: expected more {packing and packing.name} data, got the end of the file; copy it again"
            ) from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise DataError(why_not_read(self.name, error)) from error
            if packing and (isinstance(error, (OSError, *DAMAGED)) or type(error).__name__ == "ZstdError"):
                raise DataError(
                    f"{place}: expected {packing.name} data by the name, got others ({error}); copy or rename the file"
                ) from None
            raise


def _without_mark(raw: bytes, name: str) -> bytes:
    """The first line without its byte order mark."""
    for mark, encoding in OTHER_MARKS.items():
        if raw.startswith(mark):
            raise DataError(
                f"{name}: expected text in UTF-8, got {encoding} by its byte order mark; convert it: "
                f"iconv -f {encoding} -t UTF-8 {quote(name)}"
            )
    return raw.removeprefix(codecs.BOM_UTF8)


def why_not_read(name: str, error: OSError) -> str:
    if isinstance(error, PermissionError) and os.path.isdir(name):  # Windows refuses to open a folder so
        error = IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    advice = {
        FileNotFoundError: "check the path",
        IsADirectoryError: "name a file in it",
        PermissionError: "allow reading it or name another file",
    }.get(type(error), "check the disk and the path")
    return f"cannot read {name} ({error.strerror}); {advice}"
