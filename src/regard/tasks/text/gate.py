"""The gate of all text: the ending of a file's name says its form and its packing. No look at the content does."""

import bz2
import gzip
import lzma
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal, NamedTuple, cast

from regard.errors import ArgumentError, MissingExtraError

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
    """How a file is packed, by the ending of its name; None if it is not."""
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

    >>> form_of("news.csv.gz", ("tsv", "csv")), form_of("news.en", ("text",)), form_of("news.en", ("tsv", "aligned"))
    ('csv', 'text', 'aligned')
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
