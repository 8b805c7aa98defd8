"""Atomic replacement of our own files: after any failure a file is either the old one or the new one, and whole.

Links are never followed, as they may lead to a foreign file. JSON may hold a checksum of its content.
"""

import json
import os
import re
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from regard.errors import FileError, RunFolderError
from regard.files.untrusted import parse_json

OPENS_FOLDERS = os.name != "nt"
"""Whether folders can be opened, to sync and lock them; Windows refuses."""
PATIENCE_S = 2.0
"""Seconds of retries on Windows, which refuses to replace a file under reading, such as by a virus scanner."""
_TEMPORARY = re.compile(r"\.(.+)\.[0-9]+\.tmp", re.DOTALL)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to; it replaces `path` in one step when the block ends without an error.

    A reader sees the old file or the new one, also after a power cut: the bytes go to a temporary file in the same
    folder, then fsync, rename, and fsync of the folder. On an error the temporary file is removed and `path` stays. A
    killed process leaves the temporary file, recognised by `temporary_of`. An OSError names `path` if the system names
    none.
    """
    target = Path(path)
    with naming(target):
        temporary, file = _temporary(target)
    try:
        with naming(target), file:
            yield file
            to_disk(file)
        rename(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(target: Path) -> tuple[Path, BinaryIO]:
    # Native thread numbers are unique on the machine; that of the first thread is the process's.
    number = threading.get_native_id()
    while True:
        path = target.with_name(f".{target.name}.{number}.tmp")
        try:
            return path, path.open("xb")
        except FileExistsError:
            number = int.from_bytes(os.urandom(7), "big")


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Put `content` at `path` in one step, as `replacing` does; text is encoded in UTF-8."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def rename(source: Path, target: Path) -> None:
    """Rename a file, whole and on the disk, in its folder; replaces the target."""
    with naming(target):
        _replace(source, target)
        _sync(target.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def file_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    if "\0" in os.fspath(path):
        raise FileError(f"cannot write {os.fspath(path)!r}: no name holds a zero byte; check the path")
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileError(
            f"cannot write {os.fspath(path)!r}: {reason}; check the path, and that there is space"
        ) from error


def temporary_of(path: Path) -> str | None:
    """The target of a temporary file, by its name; None for other files."""
    named = _TEMPORARY.fullmatch(path.name)
    return named[1] if named else None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing: {path.parent} is not what regard wrote there") from None
    except ValueError as error:
        raise RunFolderError(f"{path} is not whole JSON ({error}): cut short, or another program's") from None
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value


def _replace(source: Path, target: Path) -> None:
    deadline = time.monotonic() + (0.0 if OPENS_FOLDERS else PATIENCE_S)
    while True:
        try:
            return os.replace(source, target)
        except PermissionError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.02)


def _sync(folder: Path) -> None:
    if not OPENS_FOLDERS:  # NTFS keeps a journal of its names
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_links(*paths: Path) -> None:
    """Check that no path is a symbolic link, before writing or removing it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "last").symlink_to("/srv/models")
    ...     refuse_links(Path(folder, "last"))
    Traceback (most recent call last):
    regard.errors.RunFolderError: ...last is a link to /srv/models, and regard writes to ... only its own files: ...
    """
    for path in paths:
        if path.is_symlink():
            raise RunFolderError(
                f"{path} is a link to {os.readlink(path)}, and regard writes to and removes only its own files: "
                "put what it leads to in its place, or remove the link"
            )


def is_file_below(name: str) -> bool:
    """Whether a relative name in a file stays below the file's folder.

    >>> [is_file_below(name) for name in ("data/valid.jsonl", "../x", "/etc/passwd", "", ".", "a/../../b")]
    [True, False, False, False, False, False]
    """
    parts = name.split("/")
    return not {"", ".", ".."} & set(parts) and "\0" not in name and "\\" not in name


def remove_empty(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()


CHECKSUM = "crc32"
_CHUNK_BYTES = 2**20


def write_checksummed(path: Path, value: Mapping[str, Any]) -> None:
    write_json(path, {**value, CHECKSUM: _checksum(value)})


def read_checksummed(path: Path) -> dict[str, Any]:
    """Read an object of `write_checksummed`, or one without a checksum; RunFolderError for anything else."""
    value = read_json(path)
    seal = value.pop(CHECKSUM, None)
    if seal is not None and seal != _checksum(value):
        raise RunFolderError(f"{path} was altered: its checksum is not the one written with it; copy it again")
    return value


def checksum_of_file(path: Path) -> dict[str, int | str]:
    size = crc = 0
    for chunk in _chunks(path):
        size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return {"bytes": size, "crc32": f"{crc:08x}"}


def _checksum(value: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(value, sort_keys=True).encode()):08x}"


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
