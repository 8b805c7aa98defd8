"""Translate the lines of a file in order, one window at a time; a bad line keeps its place among the answers."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, NamedTuple

from regard.errors import DataError
from regard.tasks.text.gate import RunningTextFormat
from regard.tasks.text.lines import BadLines, Line, Lines, decoded
from regard.tasks.text.pair_store import chunks
from regard.tasks.text.texts import text_of_json
from regard.tasks.translation.bulk.resumable_output import Unfinished
from regard.tasks.translation.options import Request, TranslationOptions
from regard.tasks.translation.results import Translation
from regard.tasks.translation.translator import Translator

Parse = Callable[[Line], Request]
"""Makes a request of a line; raises DataError if the line cannot be read."""
Show = Callable[[int, Translation], str]
"""Makes the output of an answer and its number, without the last line feed."""


class Answered(NamedTuple):
    line: Line
    translation: Translation


def whole_line(line: Line, prefix: str = "", *, format: RunningTextFormat = "text") -> Request:
    """Read a whole line as a sentence, or its JSON object with one, whose translation must begin with `prefix`."""
    return Request(decoded(*line) if format == "text" else text_of_json(line, ("source", "text")), prefix)


def sentence_and_prefix(line: Line) -> Request:
    r"""Read a sentence, a tab, and the beginning of its translation. The tab and the prefix may be left out.

    >>> sentence_and_prefix(Line("x:1", b"Good day.\tBonjour"))[:2]
    ('Good day.', 'Bonjour')
    """
    cells = decoded(*line).split("\t")
    if len(cells) > 2:
        raise DataError(
            f"{line.place}: expected a sentence and a prefix with a tab between them, got {len(cells)} columns"
        )
    return Request(cells[0], "".join(cells[1:]))


def answered(
    translator: Translator, lines: Iterable[Line], options: TranslationOptions, *, parse: Parse, window_lines: int
) -> Iterator[list[Answered]]:
    """Translate windows of lines. The translation of a bad line is empty, and its `problem` names the place."""
    for window in chunks(lines, window_lines):
        parsed = [_parsed(line, parse) for line in window]
        requests = [Request("") if isinstance(one, DataError) else one for one in parsed]
        found = []
        for line, one, translation in zip(window, parsed, translator.translate_window(requests, options), strict=True):
            problem = f"{line.place}: {translation.problem}" if translation.problem else None
            problem = str(one) if isinstance(one, DataError) else problem
            found.append(Answered(line, translation._replace(problem=problem)))
        yield found


class Notes:
    def __init__(self) -> None:
        self.lines = 0
        self.first: str | None = None

    def add(self, note: str) -> None:
        self.lines += 1
        self.first = self.first or note

    def __str__(self) -> str:
        return f"{self.lines:,}; the first: {self.first}"


@dataclass(frozen=True, slots=True)
class BulkTranslation:
    lines: Iterator[Line]
    windows: Iterator[list[Answered]]
    """The windows that `answered` makes of these lines."""
    show: Show
    bad_lines: BadLines
    """Whether the work ends at a bad line, or answers it by an empty one."""
    bad: Notes = field(default_factory=Notes)
    cut_off: Notes = field(default_factory=Notes)
    unknown: Notes = field(default_factory=Notes)

    def take(self, window: Iterable[Answered], *, after: int) -> str:
        """The answers to lines that follow on line number `after`, as they are printed; lines with a note are counted.

        Raises:
            DataError: a line is bad, and the work is to end there.
        """
        shown = []
        for number, (_, translation) in enumerate(window, start=after + 1):
            shown.append(f"{self.show(number, translation)}\n")
            if translation.problem is not None:
                if self.bad_lines == "stop":
                    raise DataError(translation.problem)
                self.bad.add(translation.problem)
            first = translation.candidates[0]
            if first.limited or not first.finished:  # it was cut off at the most tokens, or better ones were
                self.cut_off.add(f"line {number}")
            if translation.unknown:
                self.unknown.add(f"line {number}: {one_line(', '.join(translation.unknown)):.200}")
        return "".join(shown)

    def print(self, file: IO[str], *, flush: bool) -> None:
        """Write the answers to a stream.

        Raises:
            DataError: a line is bad, and the work is to end there; the answers before it are written.
        """
        for number, one in enumerate(chain.from_iterable(self.windows)):
            print(self.take([one], after=number), file=file, end="", flush=flush)

    def written(self, unfinished: Unfinished) -> Iterator[int]:
        """Write all answers and finish the file; yields the number of lines answered so far, after each window.

        Raises:
            DataError: a line is bad, and the work is to end there; the answers before its window are kept.
            OSError: the disk is full; the answers so far are kept.
        """
        for window in self.windows:
            content = self.take(window, after=unfinished.lines)
            unfinished.add((one.line for one in window), content)
            yield unfinished.lines
        unfinished.finish()


def as_plain_text(_number: int, translation: Translation) -> str:
    return one_line(translation.text)


def one_line(text: str) -> str:
    """Replace line breaks, which a model may write: each line of the output answers one line of the input."""
    return " ".join(text.splitlines())


def count_lines(path: Path) -> int:
    return sum(1 for _ in Lines(path))


def _parsed(line: Line, parse: Parse) -> Request | DataError:
    try:
        return parse(line)
    except DataError as error:
        return error
