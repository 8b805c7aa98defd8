"""Sealed files: JSON objects with a checksum of their content, against alteration."""

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regard.errors import RunFolderError
from regard.files.atomic import read_json, write_json

SEAL = "crc32"
_CHUNK_BYTES = 2**20


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as `write_json` does, with the checksum of its content."""
    write_json(path, {**value, SEAL: _checksum(value)})


def read_sealed(path: Path) -> dict[str, Any]:
    """Read an object of `write_sealed`; an object without a checksum passes.

    Raises:
        RunFolderError: the file is absent, cut short, altered, or holds something other than a JSON object.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "x.json")
    ...     write_sealed(path, {"step": 100})
    ...     _ = path.write_text(path.read_text().replace("100", "108"))  # a bit has flipped
    ...     read_sealed(path)
    Traceback (most recent call last):
    regard.errors.RunFolderError: ...x.json was altered: its checksum is not the one written with it; copy it again
    """
    value = read_json(path)
    seal = value.pop(SEAL, None)
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
