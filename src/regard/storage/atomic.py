"""Files that are either the old ones or the new ones, never half of each, whatever happens while they are written."""

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from regard.errors import RunFolderError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to that takes the place of `path` in one step, once the block has ended without an error.

    A reader sees the old file or the new one, also after a power cut: the bytes go to a temporary name in the same
    folder and to the disk (fsync) before the name changes, and the folder is synced last, so that the new name
    survives too. If anything fails, the temporary file is removed and whatever was at `path` stays. A process that is
    killed leaves the temporary file; `is_temporary` knows it by its name.

    Raises:
        OSError: no such folder, no permission, no space; it names `path` where the system names nothing.
    """
    target = Path(path)
    # The number of a thread is that of no other on the machine; the first thread's is that of the process.
    temporary = target.with_name(f".{target.name}.{threading.get_native_id()}.tmp")
    try:
        with naming(target), temporary.open("wb") as file:
            yield file
            to_disk(file)
        rename(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Put `content` at `path` in one step, as `replacing` does; text in UTF-8.

    Raises:
        OSError: the disk is full or the folder cannot be written to.
    """
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def to_disk(file: BinaryIO) -> None:
    """Return when all that was written is on the disk.

    Raises:
        OSError: the disk is full.
    """
    file.flush()
    os.fsync(file.fileno())


def rename(source: Path, target: Path) -> None:
    """Give a file that is whole, and on the disk, its name in the same folder; whatever had that name is replaced.

    Raises:
        OSError: the folder cannot be written to.
    """
    with naming(target):
        os.replace(source, target)
        _sync(target.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name a file in errors that do not: the system reports a full disk without the name of the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def is_temporary(path: Path) -> bool:
    """Whether a file is what a killed process left of one that it was writing.

    >>> is_temporary(Path("run/.config.json.4711.tmp")), is_temporary(Path("run/notes.tmp"))
    (True, False)
    """
    stem, _, number = path.name.removesuffix(".tmp").rpartition(".")
    return path.name.endswith(".tmp") and bool(stem) and number.isdigit()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as indented JSON, atomically.

    Raises:
        OSError: the disk is full or the folder cannot be written to.
    """
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that `write_json` wrote.

    Raises:
        RunFolderError: the file is absent, cut short, or holds something other than a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing: {path.parent} is not what regard wrote there") from None
    except ValueError as error:
        raise RunFolderError(f"{path} is not whole JSON ({error}): cut short, or another program's") from None
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value


def _sync(folder: Path) -> None:
    """Make the names in a folder durable: a rename lives in the folder, not in the file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
