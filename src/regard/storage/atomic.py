"""Files that are either the old ones or the new ones, never half of each, whatever happens while they are written."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import RunFolderError


def write_atomically(path: Path, content: bytes | str) -> None:
    """Put `content` at `path` in one step: a reader sees the old file or the new one, also after a power cut.

    The bytes go to a temporary name in the same folder and to the disk (fsync) before the name changes;
    the folder is synced last, so that the new name survives too. If anything fails, the temporary file
    is removed and whatever was at `path` stays.

    Raises:
        OSError: the disk is full or the folder cannot be written to.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk is reported without the name of the file
        raise
    sync_folder(path.parent)


def is_temporary(path: Path) -> bool:
    """Whether a file is what a killed process left of one that it was writing.

    >>> is_temporary(Path("run/.config.json.4711.tmp")), is_temporary(Path("run/notes.tmp"))
    (True, False)
    """
    stem, _, number = path.name.removesuffix(".tmp").rpartition(".")
    return path.name.endswith(".tmp") and bool(stem) and number.isdigit()


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable (a rename lives in the folder, not in the file)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
