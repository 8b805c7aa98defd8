"""Lines of a file through a translator: in order, a window at a time, with a place for each that is bad."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, NamedTuple

from regard.errors import DataError
from regard.tasks.translation.bulk.resumable_output import Unfinished
from regard.tasks.translation.options import Request, TranslationOptions
from regard.tasks.translation.results import Translation
from regard.tasks.translation.translator import Translator
from regard.text.lines import BadLines, Line, decoded, raw_lines

Parse = Callable[[Line], Request]
"""What a line asks for; a DataError if it cannot be read."""
Show = Callable[[int, Translation], str]
"""The lines of output for an answer and its number, without the last line's end."""


class Answered(NamedTuple):
    """A line and its translation."""

    line: Line
    translation: Translation


def whole_line(line: Line, prefix: str = "") -> Request:
    """The whole line, whose translation must begin with `prefix`.

    Raises:
        DataError: it is not UTF-8.
    """
    return Request(decoded(*line), prefix)


def sentence_and_prefix(line: Line) -> Request:
    r"""A sentence, a tab, and what its translation must begin with, which may be left out with its tab.

    Raises:
        DataError: it is not UTF-8, or has more than one tab.

    >>> sentence_and_prefix(Line("x:1", b"Good day.\tBonjour"))
    Request(source='Good day.', prefix='Bonjour')
    """
    cells = decoded(*line).split("\t")
    if len(cells) > 2:
        raise DataError(
            f"{line.place}: expected a sentence and a prefix with a tab between them, got {len(cells)} columns"
        )
    return Request(*cells)


def answered(
    translator: Translator, lines: Iterable[Line], options: TranslationOptions, *, parse: Parse, window_lines: int
) -> Iterator[list[Answered]]:
    """Windows of lines with their translations; a bad line's is empty and names the place in its `problem`."""
    iterator = iter(lines)
    while window := list(islice(iterator, window_lines)):
        parsed = [_parsed(line, parse) for line in window]
        requests = [Request("") if isinstance(one, DataError) else one for one in parsed]
        found = []
        for line, one, translation in zip(window, parsed, translator.translate_window(requests, options), strict=True):
            problem = f"{line.place}: {translation.problem}" if translation.problem else None
            problem = str(one) if isinstance(one, DataError) else problem
            found.append(Answered(line, translation._replace(problem=problem)))
        yield found


class BadLinePolicy:
    """Stops at the first bad line, or lets them pass as empty ones and counts them."""

    def __init__(self, bad_lines: BadLines) -> None:
        self._stops = bad_lines == "stop"
        self.skipped = 0
        self.first: str | None = None

    def check(self, translation: Translation) -> Translation:
        """The translation.

        Raises:
            DataError: its line is bad, and bad lines stop.
        """
        if translation.problem is not None:
            if self._stops:
                raise DataError(translation.problem)
            self.skipped += 1
            self.first = self.first or translation.problem
        return translation


@dataclass(frozen=True, slots=True)
class BulkTranslation:
    """Lines to translate, and what becomes of their translations."""

    lines: Iterator[Line]
    windows: Iterator[list[Answered]]
    """Of these lines, as `answered` makes them."""
    show: Show
    policy: BadLinePolicy

    def print(self, file: IO[str], *, flush: bool) -> None:
        """Write the answers to a stream.

        Raises:
            DataError: a bad line, if those stop; the answers before it are written.
        """
        for number, one in enumerate(chain.from_iterable(self.windows), start=1):
            print(self.show(number, self.policy.check(one.translation)), file=file, flush=flush)

    def finish(self, unfinished: Unfinished, tell: Callable[[int], None] = lambda lines: None) -> None:
        """Write all answers and finish the file; `tell` hears how many lines have been answered.

        Raises:
            DataError: a bad line, if those stop; what was answered before its window is kept.
            OSError: the disk is full; what was answered is kept.
        """
        for window in self.windows:
            numbered = enumerate((self.policy.check(one.translation) for one in window), start=unfinished.lines + 1)
            content = "".join(f"{self.show(number, translation)}\n" for number, translation in numbered)
            unfinished.add((one.line for one in window), content)
            tell(unfinished.lines)
        unfinished.finish()


def count_lines(path: Path) -> int:
    """How many lines a file has, gzipped or not.

    Raises:
        DataError: it cannot be read.
    """
    return sum(1 for _ in raw_lines(path))


def _parsed(line: Line, parse: Parse) -> Request | DataError:
    try:
        return parse(line)
    except DataError as error:
        return error
