"""The forms in which files hold items: where a record begins, and the item that it is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

from regard.errors import ArgumentError, DataError
from regard.files.untrusted import parse_json
from regard.tasks.text.gate import form_of_pairs, form_of_text
from regard.tasks.text.lines import Line, Lines, StrPath, decoded, refuse_long
from regard.tasks.text.unicode import normalise

R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordForm(Generic[R, T]):
    """A way in which files hold items: how their records are found, and the item of a record."""

    records: Callable[[Sequence[Lines]], Iterator[R]]
    parse: Callable[[R], T]
    is_by_twos: bool = False
    """Whether each item is in two files."""

    def items(self, files: Sequence[Lines]) -> Iterator[Callable[[], T]]:
        """A function for each record, which parses it."""
        return (partial(self.parse, record) for record in self.records(files))


def items_of(
    files: Sequence[StrPath],
    format: str | None,
    forms: Mapping[str, RecordForm[Any, T]],
    *,
    too_long: Callable[[str], None] = refuse_long,
) -> Iterator[Callable[[], T]]:
    """A function for each record of files, which returns its item."""
    if format is not None and format not in forms:
        raise ArgumentError(f"expected --data-format out of {', '.join(forms)}, got {format!r}")
    if not files or (format is not None and forms[format].is_by_twos and len(files) % 2):
        raise ArgumentError(
            f"expected files of pairs, or two aligned files, got {len(files)} with format {format!r}; "
            "give two (or four, ...) for aligned, and one or more for any other"
        )
    return _items([Lines(file, too_long=too_long) for file in files], format, forms)


def _items(
    files: list[Lines], format: str | None, forms: Mapping[str, RecordForm[Any, T]]
) -> Iterator[Callable[[], T]]:
    if format is not None:
        yield from forms[format].items(files)
    elif "text" in forms:
        for file in files:
            yield from forms[form_of_text(file.head)].items([file])
    else:
        format = form_of_pairs([file.name for file in files], [file.head for file in files[:2]])
        yield from forms[format].items(files)


def in_a_row(files: Sequence[Lines]) -> Iterator[Line]:
    """The lines of files, one file after the other."""
    return chain.from_iterable(files)


def json_of(line: Line) -> Any:
    """The value of a line of JSON; raises DataError if it has none."""
    text = decoded(*line)
    try:
        return parse_json(text)
    except DataError as error:
        raise DataError(
            f"{line.place}: expected one JSON object a line, got something else ({error}); correct the line"
        ) from None


def shape_of(record: object) -> str:
    """The kind of a JSON value, and of those in an object."""
    if not isinstance(record, dict):
        return f"a JSON {type(record).__name__}"
    held = ", ".join(f'"{key[:40]}": {type(value).__name__}' for key, value in list(record.items())[:5])
    return f"{{{held}}}"


def normalised(place: str, text: str) -> str:
    """A text in NFC; raises DataError, with its place, if it holds half of a surrogate pair."""
    try:
        return normalise(text)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None
