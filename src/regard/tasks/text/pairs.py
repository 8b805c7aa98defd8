"""Parallel text: pairs of sentences from tables, aligned files, JSON lines or translation memories (TMX).

A sentence may have several reference translations.
"""

import csv
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from regard.errors import ArgumentError, DataError
from regard.tasks.text.forms import RecordForm, in_a_row, json_of, normalised, reader_of, shape_of
from regard.tasks.text.lines import LONGEST_LINE_BYTES, BadLines, Line, Lines, PairFormat, Reader, StrPath, decoded
from regard.tasks.text.unicode import normalise

LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
SIDES = ("source", "target")


class CsvRow(NamedTuple):
    place: str
    cells: list[str]
    width: int
    """How many cells the first row has."""
    columns: tuple[int, int]


class Unit(NamedTuple):
    place: str
    sides: tuple[bytes, ...]


def csv_rows(files: Sequence[Lines], *, has_header: bool) -> Iterator[CsvRow]:
    """The rows behind each file's header, or all of them. The first row decides between commas and semicolons."""
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_LINE_BYTES))  # Python's own is 131,072 characters
    for file in files:
        begun = list[str]()
        texts = (line.raw.decode(errors="surrogateescape") + "\n" for line in file)

        def from_begin(begun: list[str] = begun, texts: Iterator[str] = texts) -> Iterator[str]:
            yield from begun
            for text in texts:
                begun.append(text)
                yield text

        place = f"{file.name}:1"
        try:
            first = {mark: next(filter(None, csv.reader(from_begin(), delimiter=mark)), []) for mark in ",;"}
            if not any(first.values()):
                continue
            head, mark = _first_row(first, place)
            columns = _columns(head, file, place) if has_header else (0, 1)
            rows = csv.reader(chain(begun, texts), delimiter=mark)
            for number, row in enumerate(filter(None, rows)):
                place = f"{file.name}:{rows.line_num}"
                if number or not has_header:
                    yield CsvRow(place, row, len(head) if has_header else 2, columns)
        except csv.Error as error:
            raise DataError(f"{place}: expected a table of cells ({error}); quote those with line ends") from None


def _first_row(first: Mapping[str, list[str]], place: str) -> tuple[list[str], str]:
    cut = {mark: row for mark, row in first.items() if len(row) > 1}
    named = {mark: row for mark, row in cut.items() if set(SIDES) <= _names(row).keys()}
    if len(found := named or cut) != 1:
        said = "both stand" if found else "neither stands"
        raise DataError(
            f"{place}: expected a comma or a semicolon between the cells of the first line, {said} there; "
            "quote the cells, or name another form by --data-format"
        )
    ((mark, row),) = found.items()
    return row, mark


def _columns(head: list[str], file: Lines, place: str) -> tuple[int, int]:
    names = _names(head)
    if set(SIDES) <= names.keys():
        return names["source"], names["target"]
    told = [name.strip()[:60] for name in head[:5]]
    if len(head) != 2:
        raise DataError(
            f"{place}: expected a header with `source` and `target`, or of two columns, got {len(head)} columns "
            f"({', '.join(told)}): name the two so"
        )
    file.notes.append(
        f"{file.name}: the first line is a header, sources are {told[0]!r} and targets {told[1]!r} "
        "(--data-format csv-no-header reads it as a pair)"
    )
    return 0, 1


def _names(head: Sequence[str]) -> dict[str, int]:
    return {name.strip().lower(): n for n, name in reversed(list(enumerate(head)))}


def tmx_units(files: Sequence[Lines]) -> Iterator[Unit]:
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
                        yield Unit(f"{file.name}, unit {number}", tuple(_sides(element, source)))
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
        format: "tsv" (source, tab, target), "tsv-extra" (the same, with further columns ignored), "csv" (a header of
            two columns, or one that names `source` and `target`), "csv-no-header" (two columns), "jsonl"
            ({"source": ..., "target": ...} on each line), "tmx" (a translation memory of two languages) or "aligned"
            (a.en a.de b.en b.de ...). None: the ending of each name decides (`regard.tasks.text.lines`).
        bad_lines: "stop" at the first bad line, or "skip" and count them in the reader's `skipped`.

    Raises:
        ArgumentError: the format is unknown, a name does not tell it, or it needs another number of files.
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
    must_hold = f"pairs of sentences in {' and '.join(map(str, files))}"
    return reader_of(files, format, forms, bad_lines=bad_lines, must_hold=must_hold)


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


def _from_row(row: CsvRow) -> Pair:
    if len(row.cells) != row.width:
        raise DataError(
            f"{row.place}: expected {row.width} cells, got {len(row.cells)}; put quotes around cells with a comma or "
            "semicolon of their own"
        )
    raw = (row.cells[n].encode(errors="surrogateescape") for n in row.columns)
    source, target = (decoded(row.place, one) for one in raw)
    return _pair((row.place, source), (row.place, target))


def _from_unit(unit: Unit) -> Pair:
    if len(unit.sides) != 2:
        raise DataError(f"{unit.place}: expected a source and a target, got {len(unit.sides)}; keep these two")
    source, target = (decoded(unit.place, raw) for raw in unit.sides)
    return _pair((unit.place, source), (unit.place, target))


def _from_aligned(lines: tuple[Line, ...]) -> Pair:
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


def in_step(files: Sequence[Lines]) -> Iterator[tuple[Line, ...]]:
    for number, lines in enumerate(zip_longest(*files)):
        if None in lines:
            short, place = files[lines.index(None)], next(line.place for line in lines if line is not None)
            raise DataError(
                f"{place}: expected aligned files to have as many lines as each other, "
                f"but {short.name} ends after line {number}; give files of equal length"
            )
        yield lines


def _by_twos(files: Sequence[Lines]) -> Iterator[tuple[Line, ...]]:
    return chain.from_iterable(in_step(files[at : at + 2]) for at in range(0, len(files), 2))


PAIR_FORMS: Mapping[str, RecordForm[Any, Pair]] = MappingProxyType(
    {
        "tsv": RecordForm(in_a_row, partial(_from_table, extra_columns=False)),
        "tsv-extra": RecordForm(in_a_row, partial(_from_table, extra_columns=True)),
        "csv": RecordForm(partial(csv_rows, has_header=True), _from_row),
        "csv-no-header": RecordForm(partial(csv_rows, has_header=False), _from_row),
        "jsonl": RecordForm(in_a_row, _from_json),
        "tmx": RecordForm(tmx_units, _from_unit),
        "aligned": RecordForm(_by_twos, _from_aligned, is_by_twos=True),
    }
)


class Judged(NamedTuple):
    source: str
    references: tuple[str, ...]


def read_references(source: StrPath, references: Sequence[StrPath], *, bad_lines: BadLines = "stop") -> Reader[Judged]:
    """The lines of a file, each with the lines of the same number in other files: one file for each set of references.

    A sentence may lack some references, but not all. Its lines in those files are then empty.
    """
    if not references:
        raise ArgumentError("expected one file of references or more, got none")
    sides = (partial(_judged, lines) for lines in in_step([*map(Lines, (source, *references))]))
    return Reader(sides, bad_lines=bad_lines, must_hold=f"sentences in {source}")


def read_judged(
    paths: Sequence[StrPath], *, format: PairFormat | None = None, bad_lines: BadLines = "stop"
) -> Reader[tuple[str, str | tuple[str, ...]]]:
    forms: dict[str, RecordForm[Any, Any]] = {**PAIR_FORMS, "jsonl": RecordForm(in_a_row, _judged_json)}
    return read_items(paths, format, forms, bad_lines=bad_lines)


def _judged_json(line: Line) -> Judged:
    try:
        record = json_of(line)
        source, target = record["source"], record["target"]
        texts = [source, *([target] if isinstance(target, str) else target)]
        is_whole = len(texts) > 1 and all(isinstance(text, str) and text.strip() for text in texts)
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise DataError(
            f'{line.place}: expected {{"source": text, "target": text or a list of texts}}, none of them empty, '
            f"got {line.raw[:60].decode(errors='replace')!r}; correct the line"
        )
    return Judged(normalise(source), tuple(map(normalise, texts[1:])))


def _judged(lines: tuple[Line, ...]) -> Judged:
    source, *references = (decoded(*line) for line in lines)
    kept = tuple(text for text in references if text.strip())
    if not source.strip() or not kept:
        missing = "a source" if not source.strip() else "a reference in one of the files"
        raise DataError(f"{lines[0].place}: expected {missing}, got an empty line; fill it in or remove the line")
    return Judged(source, kept)
