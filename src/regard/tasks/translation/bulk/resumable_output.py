"""A file of answers to lines, written window by window. After any interruption the work can go on.

out.txt.partial        the answers so far
out.txt.partial.json   the record: how many lines they answer, in how many bytes; a digest of those lines; the settings

At the end of each window the answers are on the disk (fsync) before the record says so. When the work goes on, all
bytes beyond those of the record are cut off, and their lines are answered again. A window is answered as a whole, so
that its batches, and with them the last bits of its scores, are the same as in a run without interruption.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from itertools import islice
from os.path import realpath
from pathlib import Path
from typing import Any, BinaryIO

from regard.errors import ArgumentError, RunFolderError
from regard.files.atomic import naming, part_from_other_names, read_json, refuse_links, rename, to_disk, write_json
from regard.files.locks import lock
from regard.tasks.text.lines import Line

FORMAT = 1


class Unfinished:
    """A file of answers that is not finished yet; see `opened`."""

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
        """Start an empty file.

        Raises:
            ArgumentError: the target or an unfinished file exists, and is not to be overwritten.
            RunFolderError: in the place of the unfinished file there is a link, or a file regard did not write.
            OSError: the folder cannot be written to.
        """
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
        part_from_other_names(self.partial)
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
    """Open a file of answers to write to, new or unfinished; None if there is nothing left to write.

    Args:
        target: the file to make; it has that name once it is whole. If it is a link, it stays one, and the file to
            which it leads is made; the unfinished file is then beside that one.
        settings: all that decides the answers, as values for JSON; only with the same can work go on.
        resume: go on with an unfinished file; start one if there is none.
        overwrite: replace the target when the new file is whole, and an unfinished file at once.
    """
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
