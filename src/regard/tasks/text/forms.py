"""The forms in which files hold items: where a record begins, and the item that it is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

from regard.errors import ArgumentError, DataError
from regard.files.untrusted import parse_json
from regard.tasks.text.gate import STANDARD_INPUT, form_of
from regard.tasks.text.lines import BadLines, Line, Lines, Reader, StrPath, decoded, refuse_long
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
        return (partial(self.parse, record) for record in self.records(files))


def reader_of(
    paths: Sequence[StrPath],
    format: str | None,
    forms: Mapping[str, RecordForm[Any, T]],
    *,
    bad_lines: BadLines,
    must_hold: str | None = None,
    too_long: Callable[[str], None] = refuse_long,
) -> Reader[T]:
    """The items of files, each file in the form that is told, or else in that of its ending."""
    if format is not None and format not in forms:
        raise ArgumentError(f"expected --data-format out of {', '.join(forms)}, got {format!r}")
    told = [format or form_of(path, forms) for path in paths]
    by_twos = sum(forms[one].is_by_twos for one in told)
    if not paths or (by_twos and (by_twos < len(paths) or len(paths) % 2)):
        names = ", ".join("standard input" if path == STANDARD_INPUT else str(path) for path in paths[:3])
        raise ArgumentError(
            f"expected one table or more (.tsv, .csv, .jsonl, .tmx), or two files of aligned lines (or four, ...), got "
            f"{len(paths)}{names and f' ({names})'}: name others, or say the form by --data-format"
        )
    files = [Lines(path, too_long=too_long) for path in paths]
    parts = [(told[0], files)] if by_twos else [(one, [file]) for one, file in zip(told, files, strict=True)]
    items = chain.from_iterable(forms[one].items(some) for one, some in parts)
    return Reader(items, bad_lines=bad_lines, must_hold=must_hold, files=files)


def in_a_row(files: Sequence[Lines]) -> Iterator[Line]:
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
