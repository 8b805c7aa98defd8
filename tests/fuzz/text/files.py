"""Draws files of text: scripts, rulers, tags, separators, line ends, encodings, containers and names."""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.drawing import Drawn

WORDS = (
    *("we", "see", "two", "cats", "on y voit", "chats", "木々", "我今天喜欢茶。", "звёзды", "हिन्दी", "ผมรักคุณ", "مرحبا"),
    *("e\u0301te\u0301", "👩‍👩‍👧", "<b>", "</b>", '<a title="x > y" href=z>', "<!-- -->", "&amp;", "http://a.b/c?d=e"),
    *(
        "%.2f",
        "%(n)s",
        "{0}",
        "{name}",
        "1,024",
        "-" * 70,
        "=" * 300,
        '"',
        '""',
        "'",
        ",",
        ";",
        "|||",
        "\t",
        " ",
        "  ",
        "",
    ),
    *(
        "\u00a0",
        "\u2028",
        "\x85",
        "\x0b",
        "\x1c",
        "\u200b",
        "\ufeff",
        "\x00",
        "\x1b[31m",
        "\u202e",
        "\ud7ff",
        "\U0010ffff",
    ),
)
SEPARATORS = ("\t", "\t", "\t", " ||| ", " = ", ",", ";", " ", "\t\t")
LINE_ENDS = ("\n", "\n", "\r\n", "\r", "\n\n", "")
ENCODINGS = (
    "utf-8",
    "utf-8",
    "utf-8-sig",
    "utf-16",
    "utf-16-le",
    "utf-16-be",
    "utf-32",
    "latin-1",
    "cp1252",
    "gb18030",
    "shift_jis",
)
NAMES = {
    "lines": (
        "a.tsv",
        "a.tsv",
        "a.txt",
        "a.txt",
        "a.en",
        "a.pt_BR",
        "a",
        "a.parquet",
        "a b'.txt",
        "a\udcff.txt",
        "-a.txt",
    ),
    "csv": ("a.csv",),
    "json": ("a.jsonl", "a.ndjson", "a.json"),
    "tmx": ("a.tmx",),
    "three columns": ("a.tsv", "a.csv"),
}
"""The names of files by their style; each may be that of another."""
PACKED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "plain": ("", bytes), "gzip": (".gz", gzip.compress), "bz2": (".bz2", bz2.compress), "xz": (".xz", lzma.compress),
}  # fmt: skip
"""The ending and the packing of each."""


@dataclass(frozen=True)
class Drawing:
    path: Path
    rows: list[list[str]]
    is_plain: bool
    """True for UTF-8 lines that end in a line feed, in a file that is neither packed nor damaged."""


def draw_file(drawn: Drawn, folder: Path, columns: int) -> Drawing:
    rows = [[_sentence(drawn) for _ in range(columns)] for _ in range(drawn.of([12, 1, 2, 5, 30, 0]))]
    separator, end, encoding = drawn.of(SEPARATORS), drawn.of(LINE_ENDS), drawn.of(ENCODINGS)
    style = drawn.of(["lines"] * 6 + ["csv", "json", "tmx", "three columns"])
    data = _styled(rows, style, separator, end).encode(encoding, errors=drawn.of(["ignore", "replace"]))
    packed = drawn.of(["plain"] * 6 + ["gzip", "bz2", "xz"])
    name = drawn.of(NAMES[drawn.of([style] * 6 + list(NAMES))]) + PACKED[drawn.of([packed] * 6 + list(PACKED))][0]
    damage = drawn.of(["none"] * 6 + ["half a character", "a null", "random bytes", "one long line"])
    path = folder / name
    path.write_bytes(PACKED[packed][1](_damaged(drawn, data, damage)))
    is_plain = (style, encoding, end, packed, damage) == ("lines", "utf-8", "\n", "plain", "none") and path.suffix in (
        "",
        ".en",
        ".pt_BR",
        ".txt",
        ".tsv",
    )
    return Drawing(path, rows, is_plain)


def _sentence(drawn: Drawn) -> str:
    return drawn.of([" ", " ", ""]).join(drawn.some(WORDS, drawn.of([6, 1, 12])))


def _styled(rows: list[list[str]], style: str, separator: str, end: str) -> str:
    match style:
        case "csv":
            text = io.StringIO()
            csv.writer(text, lineterminator=end or "\n").writerows(rows)
            return text.getvalue()
        case "json":
            keys = ("source", "target", "other")
            return "".join(
                json.dumps(dict(zip(keys, row, strict=False)), ensure_ascii=len(row) == 1) + "\n" for row in rows
            )
        case "tmx":
            units = "".join(
                "<tu>"
                + "".join(
                    f'<tuv xml:lang="{n}"><seg>{cell}</seg></tuv>' for n, cell in zip(("en", "fr"), row, strict=False)
                )
                + "</tu>"
                for row in rows
            )
            return f'<?xml version="1.0"?><tmx version="1.4"><header/><body>{units}</body></tmx>'
        case "three columns":
            return "".join(separator.join([*row, "CC-BY 2.0 #1"]) + (end or "\n") for row in rows)
        case _:
            return "".join(separator.join(row) + end for row in rows)


def _damaged(drawn: Drawn, data: bytes, damage: str) -> bytes:
    at = drawn.number(0, len(data))
    match damage:
        case "half a character":
            return data[:at] + "é".encode()[:1]
        case "a null":
            return data[:at] + b"\0" + data[at:]
        case "random bytes":
            return data[:at] + bytes(drawn.integers(0, 255, drawn.number(1, 200)).tolist())
        case "one long line":
            return data[:at] + drawn.of([b"-", b"ab", "木".encode()]) * drawn.of([500, 20_000])
        case _:
            return data
