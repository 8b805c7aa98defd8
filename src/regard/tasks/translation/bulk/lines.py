"""Translate the lines of a file in order, one window at a time; a bad line keeps its place among the answers."""

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
"""Makes a request of a line; raises DataError if the line cannot be read."""
Show = Callable[[int, Translation], str]
"""Makes the output of an answer and its number, without the last line feed."""


class Answered(NamedTuple):
    """A line and its translation."""

    line: Line
    translation: Translation


def whole_line(line: Line, prefix: str = "") -> Request:
    """Read a whole line as a sentence, whose translation must begin with `prefix`.

    Raises:
        DataError: it is not UTF-8.
    """
    return Request(decoded(*line), prefix)


def sentence_and_prefix(line: Line) -> Request:
    r"""Read a sentence, a tab, and what its translation must begin with. The tab and the prefix may be left out.

    Raises:
        DataError: it is not UTF-8, or has more than one tab.

    >>> sentence_and_prefix(Line("x:1", b"Good day.\tBonjour"))
    Request(source='Good day.', prefix='Bonjour', tags=())
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
    """Stops at the first bad line, or answers bad lines by empty ones and counts them."""

    def __init__(self, bad_lines: BadLines) -> None:
        self._stops = bad_lines == "stop"
        self.skipped = 0
        self.first: str | None = None

    def check(self, translation: Translation) -> Translation:
        """Return the translation if its line is good or bad lines are skipped.

        Raises:
            DataError: its line is bad, and the policy is to stop.
        """
        if translation.problem is not None:
            if self._stops:
                raise DataError(translation.problem)
            self.skipped += 1
            self.first = self.first or translation.problem
        return translation


@dataclass(frozen=True, slots=True)
class BulkTranslation:
    """Lines to translate, and how their translations are printed."""

    lines: Iterator[Line]
    windows: Iterator[list[Answered]]
    """The windows that `answered` makes of these lines."""
    show: Show
    policy: BadLinePolicy

    def print(self, file: IO[str], *, flush: bool) -> None:
        """Write the answers to a stream.

        Raises:
            DataError: a line is bad, and the policy is to stop; the answers before it are written.
        """
        for number, one in enumerate(chain.from_iterable(self.windows), start=1):
            print(self.show(number, self.policy.check(one.translation)), file=file, flush=flush)

    def finish(self, unfinished: Unfinished, tell: Callable[[int], None] = lambda lines: None) -> None:
        """Write all answers and finish the file; `tell` is called with the number of lines answered so far.

        Raises:
            DataError: a line is bad, and the policy is to stop; the answers before its window are kept.
            OSError: the disk is full; the answers so far are kept.
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
