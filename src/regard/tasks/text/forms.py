"""The forms in which files hold items: where a record begins, and the item that it is. Running text is in two forms."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

from regard.errors import ArgumentError, DataError
from regard.files.untrusted import parse_json
from regard.tasks.text.lines import (
    STANDARD_INPUT,
    BadLines,
    Line,
    Lines,
    Reader,
    RunningTextFormat,
    StrPath,
    decoded,
    form_of,
    refuse_long,
)
from regard.tasks.text.unicode import normalise

R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordForm(Generic[R, T]):
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
    try:
        return normalise(text)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None


def text_of_json(line: Line, keys: Sequence[str] = ("text",)) -> str:
    """The text of a JSON object, under the first of some keys that it has."""
    record = json_of(line)
    texts = [record[key] for key in keys if isinstance(record, dict) and isinstance(record.get(key), str)]
    if not texts:
        raise DataError(
            f'{line.place}: expected {{"{keys[0]}": text}}, got {shape_of(record)}; rename the text to it, or read the '
            "JSON itself by --data-format text"
        )
    return normalised(line.place, texts[0])


class RunningText(Iterator[str]):
    def __init__(
        self, paths: Sequence[StrPath], *, format: RunningTextFormat | None = None, bad_lines: BadLines = "stop"
    ) -> None:
        self._cut: list[str] = []
        forms: dict[str, RecordForm[Line, str]] = {
            "text": RecordForm(in_a_row, lambda line: decoded(*line)),
            "jsonl": RecordForm(in_a_row, lambda line: text_of_json(line).removesuffix("\n") + "\n"),
        }
        self._reader = reader_of(paths, format, forms, bad_lines=bad_lines, too_long=self._cut.append)
        self._lines = (line for text in self._reader for line in text.split("\n"))
        self.size_bytes = 0
        """The bytes of the lines read so far, a line feed each."""

    def __next__(self) -> str:
        line = next(self._lines)
        self.size_bytes += len(line.encode()) + 1
        return line

    @property
    def told(self) -> list[str]:
        cut = [f"{len(self._cut):,} lines of more than 16 MiB cut (the first: {self._cut[0]})"] if self._cut else []
        return [*self._reader.told, *cut]
