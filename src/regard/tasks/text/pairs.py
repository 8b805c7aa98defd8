"""Parallel text: pairs of sentences from tables, aligned files, JSON lines or translation memories (TMX)."""

import csv
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from regard.errors import DataError
from regard.tasks.text.forms import RecordForm, in_a_row, items_of, json_of, normalised, shape_of
from regard.tasks.text.gate import PairFormat, delimiter_of
from regard.tasks.text.lines import BadLines, Line, Lines, Reader, StrPath, decoded

LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
SIDES = ("source", "target")


class RawCells(NamedTuple):
    """The cells of a row, or the two sides of a unit, each of them undecoded."""

    place: str
    raw: tuple[bytes, ...]


def csv_rows(files: Sequence[Lines]) -> Iterator[RawCells]:
    """The cells of each row; of columns named `source` and `target` in the first row, these alone."""
    for file in files:
        texts = (line.raw.decode(errors="surrogateescape") + "\n" for line in file)
        rows = csv.reader(texts, delimiter=delimiter_of(file.head) or ",")
        columns: list[int] | None = None
        try:
            for number, row in enumerate(filter(None, rows)):
                names = [name.strip().lower() for name in row]
                if number == 0 and set(SIDES) <= set(names):
                    columns = [names.index(side) for side in SIDES]
                    continue
                cells = row if columns is None else [row[n] for n in columns if n < len(row)]
                raw = tuple(cell.encode(errors="surrogateescape") for cell in cells)
                yield RawCells(f"{file.name}:{rows.line_num}", raw)
        except csv.Error as error:
            raise DataError(f"{file.name}:{rows.line_num}: expected cells in quotes, got others ({error})") from None


def tmx_units(files: Sequence[Lines]) -> Iterator[RawCells]:
    """The two sides of each unit of translation memories; the source is in the language that the header names."""
    for file in files:
        parser: Any = XMLPullParser(("start", "end"))
        source, number = "*all*", 0
        try:
            for line in file:
                # Lines are UTF-8 here, whatever the declaration says of the file that they came from.
                parser.feed(re.sub(rb"^<\?xml[^>]*\?>", b"", line.raw) + b"\n")
                for event, element in cast(Any, parser.read_events()):
                    if (event, element.tag) == ("start", "header"):
                        source = element.get("srclang", source).lower()
                    elif (event, element.tag) == ("end", "tu"):
                        number += 1
                        yield RawCells(f"{file.name}, unit {number}", tuple(_sides(element, source)))
                        element.clear()
            parser.close()
        except ParseError as error:
            raise DataError(f"{file.name}: expected a TMX, got damaged XML ({error}); export it again") from None


def _sides(unit: Element, source: str) -> list[bytes]:
    variants = unit.findall("tuv")
    variants.sort(key=lambda one: (one.get(LANGUAGE, one.get("lang", ""))).lower() != source)
    return [" ".join(_text(segment).split()).encode() for one in variants for segment in one.findall("seg")]


def _text(element: Element) -> str:
    """The text of a segment without its codes of markup; only `hi` holds text."""
    inner = (f"{_text(one) if one.tag == 'hi' else ''}{one.tail or ''}" for one in element)
    return f"{element.text or ''}{''.join(inner)}"


NUMBERED = re.compile(rb"\d+\t[^\t]*\t")
"""The beginning of a line of Tatoeba's exports: the number of a sentence, and two columns or more behind it."""
T = TypeVar("T")


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


def read_pairs(
    paths: StrPath | Sequence[StrPath], *, format: PairFormat | None = None, bad_lines: BadLines = "stop"
) -> Reader[Pair]:
    """Pairs from files, packed or not, read line by line and brought to NFC.

    Args:
        paths: one file, or several files of one format, read one after the other; or two files with aligned lines, or
            several such twos. "-" is standard input. Each file is opened once, for its first pair.
        format: "tsv" (source, tab, target), "tsv-extra" (the same, with further columns ignored), "csv" (two columns,
            or a first row that names `source` and `target`), "jsonl" ({"source": ..., "target": ...} on each line),
            "tmx" (a translation memory of two languages) or "aligned" (a.en a.de b.en b.de ...). None decides by the
            beginnings of the first two files (`regard.tasks.text.gate`).
        bad_lines: "stop" at the first bad line, or "skip" and count them in the reader's `skipped`.

    Raises:
        ArgumentError: the format is unknown or needs another number of files; or, while reading, cannot be decided.
        DataError: while reading, if a line is bad (for example, a sentence is empty), aligned files have
            different lengths, there is no pair at all, or a file cannot be read or is no text.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "pairs.tsv")
    ...     _ = path.write_text("Good day.\\tBonjour.\\nno tab\\n", encoding="utf-8")
    ...     pairs = read_pairs(path, bad_lines="skip")
    ...     print(list(pairs), pairs.skipped)
    [Pair(source='Good day.', target='Bonjour.')] 1
    """
    files = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return read_items(files, format, PAIR_FORMS, bad_lines=bad_lines)


def read_items(
    files: Sequence[StrPath], format: str | None, forms: Mapping[str, RecordForm[Any, T]], *, bad_lines: BadLines
) -> Reader[T]:
    """The items of files, at least one; raises as `read_pairs` does."""
    must_hold = f"pairs of sentences in {' and '.join(map(str, files))}"
    return Reader(items_of(files, format, forms), bad_lines=bad_lines, must_hold=must_hold)


def _from_table(line: Line, *, extra_columns: bool) -> Pair:
    cells = decoded(*line).split("\t")
    if len(cells) < 2:
        raise DataError(
            f"{line.place}: expected a source and a target with a tab between them, got no tab; "
            "add it, or name another form by --data-format"
        )
    if len(cells) > 2 and not extra_columns:
        raise DataError(
            f"{line.place}: expected 2 columns, got {len(cells)}; "
            "remove the others, or leave them out by --data-format tsv-extra"
        )
    return _pair((line.place, cells[0]), (line.place, cells[1]))


def _from_cells(cells: RawCells) -> Pair:
    if len(cells.raw) != 2:
        raise DataError(
            f"{cells.place}: expected a source and a target, got {len(cells.raw)}; keep these two, or name them "
            "`source` and `target` in a first row"
        )
    source, target = (decoded(cells.place, raw) for raw in cells.raw)
    return _pair((cells.place, source), (cells.place, target))


def _from_aligned(lines: tuple[Line, Line]) -> Pair:
    source, target = lines
    return _pair((source.place, decoded(*source)), (target.place, decoded(*target)))


def _from_json(line: Line) -> Pair:
    record = json_of(line)
    sides = [record.get(key) if isinstance(record, dict) else None for key in Pair._fields]
    texts = [normalised(line.place, side) for side in sides if isinstance(side, str)]
    if len(texts) != len(sides):
        raise DataError(
            f'{line.place}: expected {{"source": text, "target": text}}, got {shape_of(record)}; correct the line'
        )
    return _pair((line.place, texts[0]), (line.place, texts[1]))


def _pair(source: tuple[str, str], target: tuple[str, str]) -> Pair:
    for (place, text), name in zip((source, target), Pair._fields, strict=True):
        if not text.strip():
            raise DataError(f"{place}: expected a {name} sentence, got an empty one; remove the pair or fill it in")
    return Pair(source[1], target[1])


def _rows(files: Sequence[Lines]) -> Iterator[Line]:
    for file in files:
        lines = file.head.splitlines()
        if lines and all(map(NUMBERED.match, lines[:-1] or lines)):
            raise DataError(
                f"{file.name}: expected a source in the first of its columns, got numbers, as in exports of Tatoeba; "
                f"keep the two columns of text: cut -f2,4 {file.name}"
            )
        yield from file


def _side_by_side(files: Sequence[Lines]) -> Iterator[tuple[Line, Line]]:
    for first, second in zip(files[::2], files[1::2], strict=True):
        for number, (source, target) in enumerate(zip_longest(first, second), 1):
            if source is None or target is None:
                short, long = (first, target) if source is None else (second, source)
                raise DataError(
                    f"{long.place}: expected aligned files to have as many lines as each other, "
                    f"but {short.name} ends after line {number - 1}; give files of equal length"
                )
            yield source, target


PAIR_FORMS: Mapping[str, RecordForm[Any, Pair]] = MappingProxyType(
    {
        "tsv": RecordForm(_rows, partial(_from_table, extra_columns=False)),
        "tsv-extra": RecordForm(_rows, partial(_from_table, extra_columns=True)),
        "csv": RecordForm(csv_rows, _from_cells),
        "jsonl": RecordForm(in_a_row, _from_json),
        "tmx": RecordForm(tmx_units, _from_cells),
        "aligned": RecordForm(_side_by_side, _from_aligned, is_by_twos=True),
    }
)
