"""Pairs in the files of other programs: tables with commas and quotes (CSV), and translation memories (TMX)."""

import csv
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from regard.errors import DataError
from regard.tasks.text.gate import delimiter_of
from regard.tasks.text.lines import Lines

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
