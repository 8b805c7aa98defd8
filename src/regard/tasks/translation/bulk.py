"""Translate the lines of a file in order, one window at a time; a bad line keeps its place among the answers.

The answers may go to a file. After any interruption the work can go on:

out.txt.partial        the answers so far
out.txt.partial.json   the record: how many lines they answer, in how many bytes; a digest of those lines; the settings

At the end of each window the answers are on the disk (fsync) before the record says so. When the work goes on, all
bytes beyond those of the record are cut off, and their lines are answered again. A window is answered as a whole, so
that its batches, and with them the last bits of its scores, are the same as in a run without interruption.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import escape
from itertools import chain, islice
from os.path import realpath
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

from regard.errors import ArgumentError, DataError, RunFolderError
from regard.files.atomic import naming, read_json, refuse_links, rename, to_disk, write_json
from regard.files.locks import lock
from regard.tasks.text.forms import text_of_json
from regard.tasks.text.lines import BadLines, Line, RunningTextFormat, decoded
from regard.tasks.text.pair_store import chunks
from regard.tasks.translation.results import Translation
from regard.tasks.translation.translation_model import Request, TranslationOptions
from regard.tasks.translation.translator import Translator

FORMAT = 1


class Unfinished:
    def __init__(self, target: Path, settings: Mapping[str, Any]) -> None:
        self.target = target
        self.partial = target.with_name(f"{target.name}.partial")
        self.record = target.with_name(f"{target.name}.partial.json")
        self.lines = 0
        """How many lines have been answered."""
        self._bytes = 0
        self._settings = dict(settings)
        self._digest = hashlib.blake2b(digest_size=16)
        self._expected_digest = self._digest.hexdigest()
        self._file: BinaryIO | None = None

    # -- opening -----------------------------------------------------------------------------------

    def begin(self, *, overwrite: bool) -> None:
        self._refuse_strangers()
        if not overwrite:
            self._refuse_to_overwrite()
        self._open()
        self._write_record()
        self._stream.truncate(0)

    def go_on(self) -> bool:
        """Go on with the unfinished file; return False if there is nothing left to write."""
        self._refuse_strangers()
        if not self.record.exists() and not self.partial.exists():
            if self.target.exists():
                raise ArgumentError(
                    f"{self.target} is there already, and nothing of it is unfinished: leave out --resume"
                )
            self.begin(overwrite=False)
            return True
        self._read_record()
        if not self.partial.exists() and self.target.is_file() and self.target.stat().st_size == self._bytes:
            self.record.unlink()  # the process was killed between the last two steps of `finish`
            return False
        if self.partial.exists() or not self._bytes:
            self._open()
        if self._file is None or self._stream.tell() < self._bytes:
            raise RunFolderError(
                f"{self.partial} has lost some of the {self._bytes:,} bytes that {self.record} knows of: "
                "begin again with --overwrite"
            )
        self._stream.truncate(self._bytes)
        return True

    def _refuse_to_overwrite(self) -> None:
        if self.record.exists() or self.partial.exists():
            raise ArgumentError(
                f"{self.partial} is an unfinished translation: go on with it (--resume) or replace it (--overwrite)"
            )
        if self.target.exists():
            raise ArgumentError(f"{self.target} is there already: replace it (--overwrite) or name another --output")

    def _refuse_strangers(self) -> None:
        """Check that the files which stand for the unfinished answers are ours: they will be replaced or cut."""
        refuse_links(self.partial, self.record)
        if self.partial.exists() and not self.partial.is_file():
            raise RunFolderError(f"{self.partial} is not a file: move it away, or name another --output")
        try:
            record = read_json(self.record) if self.record.exists() else None
        except RunFolderError:
            return  # it is damaged, as only ours can be
        is_begun = self.partial.exists() and self.partial.stat().st_size > 0
        advice = "is not what regard wrote: move it away, or name another --output"
        if record is None and is_begun:
            raise RunFolderError(f"{self.record} is missing, so {self.partial} {advice}")
        if record is not None and not set(self._described()) <= set(record):
            raise RunFolderError(f"{self.record} {advice}")

    def _read_record(self) -> None:
        record = read_json(self.record)
        try:
            settings, self.lines, self._bytes = dict(record["settings"]), record["lines"], record["bytes"]
            self._expected_digest = str(record["input"])
            if record["format"] != FORMAT or not all(type(n) is int and n >= 0 for n in (self.lines, self._bytes)):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise RunFolderError(
                f"{self.record} is not what this version of regard writes: begin again with --overwrite"
            ) from None
        for name in sorted({*settings, *self._settings}):
            theirs, ours = settings.get(name), self._settings.get(name)
            if theirs != ours:
                raise ArgumentError(
                    f"{self.partial} was begun with {name} {theirs}, not {ours}: go on with the same, "
                    "or begin again with --overwrite"
                )

    def _open(self) -> None:
        self._file = self.partial.open("ab")
        lock(
            self._stream.fileno(),
            refusal=f"another process is writing to {self.partial}: wait for it or name another --output",
        )
        for left in self.record.parent.glob(f".{escape(self.record.name)}.*.tmp"):
            left.unlink(missing_ok=True)  # a process was killed while it wrote the record

    # -- going through the lines ---------------------------------------------------------------------

    def pass_over(self, lines: Iterator[Line]) -> None:
        for line in islice(lines, self.lines):
            self._note(line)
        if self._digest.hexdigest() != self._expected_digest:
            raise ArgumentError(
                f"{self.partial} answers {self.lines:,} lines, and the input does not begin with them: "
                "give the same input, or begin again with --overwrite"
            )

    def add(self, lines: Iterable[Line], answers: str) -> None:
        content = answers.encode()
        with naming(self.partial):
            self._stream.write(content)
            to_disk(self._stream)
        for line in lines:
            self._note(line)
            self.lines += 1
        self._bytes += len(content)
        self._write_record()

    def finish(self) -> None:
        self._stream.close()
        rename(self.partial, self.target)
        self.record.unlink()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _note(self, line: Line) -> None:
        self._digest.update(line.raw)
        self._digest.update(b"\n")

    def _write_record(self) -> None:
        write_json(self.record, self._described())

    def _described(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "lines": self.lines,
            "bytes": self._bytes,
            "input": self._digest.hexdigest(),
            "settings": self._settings,
        }

    @property
    def _stream(self) -> BinaryIO:
        assert self._file is not None, "it was not opened"
        return self._file


@contextmanager
def opened(target: Path, settings: Mapping[str, Any], *, resume: bool, overwrite: bool) -> Iterator[Unfinished | None]:
    """A file to write answers to; None if there is nothing left. If the target is a link, the file to which it leads
    is made, and the unfinished file is beside that one."""
    target = Path(realpath(target)) if target.is_symlink() else target
    if target.exists() and not target.is_file():
        raise ArgumentError(f"{target} is not a file: name one to write to")
    unfinished = Unfinished(target, settings)
    try:
        if resume:
            yield unfinished if unfinished.go_on() else None
        else:
            unfinished.begin(overwrite=overwrite)
            yield unfinished
    finally:
        unfinished.close()


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
        """The answers to lines after line number `after`, as they are printed; lines with a note are counted."""
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
        for number, one in enumerate(chain.from_iterable(self.windows)):
            print(self.take([one], after=number), file=file, end="", flush=flush)

    def written(self, unfinished: Unfinished) -> Iterator[int]:
        """Write all answers and finish the file; yields the number of lines answered so far, after each window."""
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


def _parsed(line: Line, parse: Parse) -> Request | DataError:
    try:
        return parse(line)
    except DataError as error:
        return error
