"""The gate of all text: the first bytes of an input say whether it is packed, whether it is text, and in which form.

`regard.tasks.text.lines` opens every input, and asks here before its first line. The name of a file decides nothing.
"""

import bz2
import codecs
import csv
import gzip
import lzma
import re
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from shlex import quote
from typing import IO, Any, Literal, NamedTuple, cast

from regard.errors import ArgumentError, DataError, MissingExtraError

PairFormat = Literal["tsv", "tsv-extra", "csv", "jsonl", "tmx", "aligned"]
RunningTextFormat = Literal["text", "jsonl"]
DataFormat = Literal["tsv", "tsv-extra", "csv", "jsonl", "tmx", "aligned", "text"]
"""The forms of pairs and of running text."""

HEAD_BYTES = 2**16
"""At most so many bytes of an input decide; of a pipe, those that are there."""
FEWEST_NULS = 1 / 16
"""The share of NUL bytes from which on text is UTF-16: half of Latin text in it is NUL, and of others each space."""

SAVE_AS_TEXT = "save its text in UTF-8, a table with tabs between its columns"
FOREIGN = {
    rb"PAR1": ("a Parquet file", "write it as JSON lines, as pandas.read_parquet and to_json(lines=True) do"),
    rb"ARROW1": ("an Arrow file", "write its columns as JSON lines"),
    rb"%PDF-": ("a PDF", SAVE_AS_TEXT),
    rb"\xd0\xcf\x11\xe0": ("a document of Word or Excel", SAVE_AS_TEXT),
    rb"SQLite format 3\0": ("an SQLite database", "write its columns as JSON lines"),
    rb"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it"),
    rb"Rar!\x1a\x07": ("a RAR archive", "unpack it"),
    rb"\x04\x22\x4d\x18": ("lz4 data", "unpack it"),
    rb"(?s:.{257})ustar": ("a tar archive", "unpack it, and name a file of it"),
}
"""Patterns of first bytes that are no text, their names, and how to proceed."""
MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""The byte order marks of other encodings; the mark of UTF-16 begins that of UTF-32."""
OBJECT = re.compile(r'\s*\{\s*"[^"\\]{1,80}"\s*:')
"""The beginning of a line that holds a JSON object."""
SEVERAL_LINES_OF_JSON = re.compile(r'\s*[\[{]\s*["{\[]')


class Packing(NamedTuple):
    """A way to pack a file."""

    name: str
    open: Callable[[Any], IO[bytes]]


def _zstd(stream: IO[bytes]) -> IO[bytes]:
    for name in ("compression.zstd", "backports.zstd"):  # the first is Python's, from 3.14 on
        with suppress(ImportError):
            unpacked: IO[bytes] = import_module(name).ZstdFile(stream)
            return unpacked
    raise MissingExtraError("backports.zstd", extra="train")


def _only_member(stream: IO[bytes]) -> IO[bytes]:
    if not stream.seekable():
        raise DataError("expected text, got a zip archive from a pipe; unpack it (funzip), or name the file itself")
    archive = zipfile.ZipFile(stream)
    names = [one.filename for one in archive.infolist() if not one.is_dir() and not one.filename.startswith("__MACOSX")]
    if {"[Content_Types].xml", "mimetype"} & set(names):
        raise DataError(f"expected text, got an office document; {SAVE_AS_TEXT}")
    if len(names) != 1:
        raise DataError(
            f"expected a zip archive of one file, got one of {len(names)} ({', '.join(names[:3])}); "
            "unpack it, and name a file of it"
        )
    if archive.getinfo(names[0]).flag_bits & 1:
        raise DataError("expected text, got a zip archive that needs a password; unpack it")
    return archive.open(names[0])


PACKINGS = {
    rb"\x1f\x8b": Packing("gzip", lambda stream: cast(IO[bytes], gzip.GzipFile(fileobj=stream))),
    rb"BZh[1-9]1AY&SY": Packing("bzip2", bz2.BZ2File),
    rb"\xfd7zXZ\0": Packing("xz", lzma.LZMAFile),
    rb"\x28\xb5\x2f\xfd": Packing("zstd", _zstd),
    rb"PK\x03\x04": Packing("zip", _only_member),
}
"""Patterns of first bytes, and how they are unpacked."""


def packing_of(head: bytes) -> Packing | None:
    """How the bytes of an input are packed; None if they are not."""
    return next((found for pattern, found in PACKINGS.items() if re.match(pattern, head)), None)


def refuse_foreign(head: bytes, name: str) -> None:
    r"""Refuse an input that is no text in UTF-8, by its first bytes.

    >>> refuse_foreign("a\tb\n".encode("utf-16-le"), "a.tsv")
    Traceback (most recent call last):
    regard.errors.DataError: a.tsv: expected text in UTF-8, got UTF-16 (little-endian); convert it:
    iconv -f UTF-16LE -t UTF-8 a.tsv
    """
    for pattern, (kind, advice) in FOREIGN.items():
        if re.match(pattern, head):
            raise DataError(f"{name}: expected text, got {kind}; {advice}")
    if (encoding := _other_encoding(head)) is not None:
        order = {"LE": " (little-endian)", "BE": " (big-endian)"}.get(encoding[6:], " with a byte order mark")
        raise DataError(
            f"{name}: expected text in UTF-8, got {encoding[:6]}{order}; convert it: "
            f"iconv -f {encoding} -t UTF-8 {quote(name)}"
        )
    if b"\n" not in head and head.count(b"\r") > 1:
        raise DataError(
            f"{name}: expected lines that end in a line feed, got carriage returns alone, as old Macs wrote them; "
            f"convert them: tr '\\r' '\\n' < {quote(name)}"
        )
    if b"\0" in head and not _is_utf8(head):
        raise DataError(f"{name}: expected text, got bytes that are none; name another file")


def _other_encoding(head: bytes) -> str | None:
    """The encoding of a head that is UTF-16 or UTF-32, as iconv names it; None for others."""
    for mark, encoding in MARKS.items():
        if head.startswith(mark):
            return encoding
    nuls = head.count(0)
    if not nuls or (nuls < FEWEST_NULS * len(head) and _is_utf8(head)):
        return None
    at_even, at_odd = head[::2].count(0), head[1::2].count(0)
    order = "BE" if at_even > at_odd else "LE"
    if 2 * nuls > len(head):
        return f"UTF-32{'BE' if head[::4].count(0) >= head[3::4].count(0) else 'LE'}"
    return None if 8 * min(at_even, at_odd) > max(at_even, at_odd) else f"UTF-16{order}"


def _is_utf8(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # its last character may be cut
    except UnicodeDecodeError:
        return False
    return True


def form_of_pairs(names: Sequence[str], heads: Sequence[bytes]) -> PairFormat:
    """The form in which files hold pairs, by the first bytes of the first two of them.

    >>> form_of_pairs(["a", "b"], [b"one\\ttwo\\n", b"three\\tfour\\n"])
    'tsv'
    >>> form_of_pairs(["a", "b"], [b"one\\n", b"un\\n"])
    'aligned'
    """
    kinds = [_kind(head) for head in heads]
    if "json" in kinds:
        name = names[kinds.index("json")]
        raise DataError(
            f"{name}: expected one JSON object a line, got JSON over several lines or in a list; "
            f"write a line for each pair: jq -c '.[]' {quote(name)}"
        )
    if len(names) == 1:
        return "tsv" if kinds[0] == "text" else kinds[0]  # type: ignore[return-value]
    if len(names) == 2 and kinds == ["text", "text"]:
        return "aligned"
    if kinds[0] != "text" and len(set(kinds)) == 1:
        return kinds[0]  # type: ignore[return-value]
    found = " and ".join(f"{name} looks like {_SAID[kind]}" for name, kind in zip(names, kinds, strict=False))
    raise ArgumentError(
        f"expected one form for all of {len(names)} files: {found}; say how to read them, for example "
        "--data-format tsv, or --data-format aligned if line n of one file translates line n of the other"
    )


_SAID = {"tsv": "a table with tabs", "csv": "a table with commas", "jsonl": "JSON lines", "tmx": "a TMX"} | {
    "text": "lines of text"
}


def form_of_text(head: bytes) -> RunningTextFormat:
    """The form in which a file holds running text."""
    return "jsonl" if _kind(head) == "jsonl" else "text"


def _kind(head: bytes) -> str:
    """A form of pairs; "json" for JSON that is not in lines, "text" for anything else."""
    text = head.decode(errors="replace")
    if text.lstrip().startswith("<") and re.search(r"<tmx[\s>]", text):
        return "tmx"
    *whole, last = text.split("\n")
    lines = [line for line in whole or [last] if line.strip()]
    if lines and 2 * sum(map(bool, map(OBJECT.match, lines))) >= len(lines):
        return "jsonl"
    if SEVERAL_LINES_OF_JSON.match(text):
        return "json"
    if 2 * sum("\t" in line for line in lines) > len(lines):
        return "tsv"
    return "text" if delimiter_of(head) is None else "csv"


def delimiter_of(head: bytes) -> str | None:
    """The sign between the cells of a table with quotes, a comma or a semicolon; None if it is no such table."""
    *whole, last = head.decode(errors="replace").split("\n")
    lines = whole or [last]
    for delimiter in ",;":
        if any(f'"{delimiter}' in line or f'{delimiter}"' in line for line in lines):
            rows: list[list[str]] = []
            with suppress(csv.Error):
                rows = [row for row in csv.reader(lines, delimiter=delimiter) if row]
            if len(rows) > 1 and len({len(row) for row in rows[:-1]}) == 1 and len(rows[0]) > 1:
                return delimiter
    return None
