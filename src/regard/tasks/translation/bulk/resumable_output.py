"""A file of answers to lines, written window by window, that any interruption leaves fit to be gone on with.

out.txt.partial        the answers so far
out.txt.partial.json   to how many lines, in how many bytes; a digest of those lines; the settings

At the end of each window the answers are on the disk (fsync) before the record says so. Whatever stands behind
the bytes of the record is cut off when the work goes on, and those lines are answered again: a window is answered
as a whole, so that its batches, and with them the last bits of its numbers, are those of an undisturbed run.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from regard.errors import ArgumentError, RunFolderError
from regard.storage.atomic import naming, read_json, rename, to_disk, write_json
from regard.storage.locks import lock
from regard.text.lines import Line

FORMAT = 1


class Unfinished:
    """What has been answered, and where more is written; see `opened`."""

    def __init__(self, target: Path, settings: Mapping[str, Any]) -> None:
        self.target = target
        self.partial = target.with_name(f"{target.name}.partial")
        self.record = target.with_name(f"{target.name}.partial.json")
        self.lines = 0
        """Lines that have been answered."""
        self._bytes = 0
        self._settings = dict(settings)
        self._digest = hashlib.blake2b(digest_size=16)
        self._expected_digest = self._digest.hexdigest()
        self._file: BinaryIO | None = None

    # -- opening -----------------------------------------------------------------------------------

    def begin(self, *, overwrite: bool) -> None:
        """Start with nothing.

        Raises:
            ArgumentError: the target or an unfinished one is there, and is not to be overwritten.
            OSError: the folder cannot be written to.
        """
        if not overwrite:
            self._refuse_to_overwrite()
        self._open()
        self._write_record()
        self._stream.truncate(0)

    def go_on(self) -> bool:
        """Take up what is there; False if there is nothing left to write.

        Raises:
            ArgumentError: there is nothing to go on with, or it was begun with other settings.
            RunFolderError: what is there was cut short or altered.
            OSError: a file cannot be read or written.
        """
        if not self.record.exists() and not self.partial.exists():
            if self.target.exists():
                raise ArgumentError(
                    f"{self.target} is there already, and nothing of it is unfinished: leave out --resume"
                )
            self.begin(overwrite=False)
            return True
        self._read_record()
        if not self.partial.exists() and self.target.is_file() and self.target.stat().st_size == self._bytes:
            self.record.unlink()  # it was killed after its last step but one
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

    def _read_record(self) -> None:
        record = read_json(self.record)
        try:
            if record["format"] != FORMAT:
                raise ValueError
            settings, self.lines, self._bytes = dict(record["settings"]), int(record["lines"]), int(record["bytes"])
            self._expected_digest = str(record["input"])
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
            left.unlink(missing_ok=True)  # by a process that was killed while it wrote the record

    # -- going through the lines ---------------------------------------------------------------------

    def pass_over(self, lines: Iterator[Line]) -> None:
        """Read the lines that have been answered.

        Raises:
            ArgumentError: they are other lines than those.
        """
        for line in islice(lines, self.lines):
            self._note(line)
        if self._digest.hexdigest() != self._expected_digest:
            raise ArgumentError(
                f"{self.partial} answers {self.lines:,} lines, and the input does not begin with them: "
                "give the same input, or begin again with --overwrite"
            )

    def add(self, lines: Iterable[Line], answers: str) -> None:
        """Put the answers to the next lines on the disk.

        Raises:
            OSError: the disk is full.
        """
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
        """Give the file its name, in one step."""
        self._stream.close()
        rename(self.partial, self.target)
        self.record.unlink()

    def close(self) -> None:
        """Let go of the file, finished or not."""
        if self._file is not None:
            self._file.close()

    def _note(self, line: Line) -> None:
        self._digest.update(line.raw)
        self._digest.update(b"\n")

    def _write_record(self) -> None:
        write_json(
            self.record,
            {
                "format": FORMAT,
                "lines": self.lines,
                "bytes": self._bytes,
                "input": self._digest.hexdigest(),
                "settings": self._settings,
            },
        )

    @property
    def _stream(self) -> BinaryIO:
        assert self._file is not None, "it was not opened"
        return self._file


@contextmanager
def opened(target: Path, settings: Mapping[str, Any], *, resume: bool, overwrite: bool) -> Iterator[Unfinished | None]:
    """A file of answers to write to, new or gone on with; None if there is nothing left to write.

    Args:
        target: the file to make; it has that name once it is whole.
        settings: what decides the answers, as JSON can hold it; work goes on with the same only.
        resume: go on with what was left unfinished, from the start if there is nothing.
        overwrite: replace the target when the new one is whole, and what is unfinished at once.

    Raises:
        ArgumentError: the target is there, or what is unfinished has other settings.
        RunFolderError: what is unfinished was cut short or altered.
        OSError: the folder is absent, read-only or full.
    """
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
