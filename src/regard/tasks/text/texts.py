"""Running text: lines, or the texts of JSON lines."""

from collections.abc import Iterator, Sequence

from regard.errors import DataError
from regard.tasks.text.forms import RecordForm, in_a_row, json_of, normalised, reader_of, shape_of
from regard.tasks.text.gate import RunningTextFormat
from regard.tasks.text.lines import BadLines, Line, StrPath, decoded


def text_of_json(line: Line, keys: Sequence[str] = ("text",)) -> str:
    r"""The text of a JSON object, under the first of some keys that it has.

    >>> text_of_json(Line("x:1", b'{"id": 7, "text": "one\\ntwo"}'))
    'one\ntwo'
    """
    record = json_of(line)
    texts = [record[key] for key in keys if isinstance(record, dict) and isinstance(record.get(key), str)]
    if not texts:
        raise DataError(
            f'{line.place}: expected {{"{keys[0]}": text}}, got {shape_of(record)}; rename the text to it, or read the '
            "JSON itself by --data-format text"
        )
    return normalised(line.place, texts[0])


class RunningText(Iterator[str]):
    """The lines of several files as running text; a text of JSON lines has a blank line behind it."""

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
