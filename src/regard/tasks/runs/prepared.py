"""The file prepared.json of a run: counts of its text, fingerprints of its tokenizers, and a checksum of every file.

It is written last, once the text is ready.
"""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import RunFolderError
from regard.files.atomic import checksum_of_file, is_file_below, read_checksummed, write_checksummed
from regard.tasks.runs.run_folder import RunFolder

SUMS = {"bytes": int, "crc32": str}
"""The types of the values of `checksum_of_file`."""


def write_prepared(folder: RunFolder, record: Mapping[str, Any]) -> None:
    """Write prepared.json, which says that the text is ready: the tokenizers and all of data/ must be complete."""
    paths = [*folder.path.glob("*tokenizer.json"), *(path for path in folder.data.rglob("*") if path.is_file())]
    files = {path.relative_to(folder.path).as_posix(): checksum_of_file(path) for path in sorted(paths)}
    write_checksummed(folder.prepared_file, {**record, "files": files})


def read_prepared(folder: RunFolder) -> dict[str, Any]:
    """Read the record of `write_prepared`."""
    prepared, path = read_checksummed(folder.prepared_file), folder.prepared_file
    files = prepared.get("files", {})
    if not isinstance(files, dict):
        raise RunFolderError(f"{path}: files must be an object, got {reprlib.repr(files)}; copy it again")
    for name, sums in files.items():
        # A name with a path out of the folder would have a stranger's file read, and its checksum told.
        if not is_file_below(name) or not isinstance(sums, dict) or {n: type(s) for n, s in sums.items()} != SUMS:
            raise RunFolderError(f"{path}: {name[:80]!r} has {reprlib.repr(sums)} as its checksum; copy it again")
    return prepared


def check_file(path: Path, folder: RunFolder, prepared: Mapping[str, Any]) -> None:
    expected: Mapping[str, Any] | None = prepared.get("files", {}).get(path.relative_to(folder.path).as_posix())
    if expected is None:
        return
    try:
        found = checksum_of_file(path)
    except OSError as error:
        raise RunFolderError(f"cannot read {path} ({error.strerror}), and the run needs it; copy it again") from None
    if found != expected:
        kind = "tokenizer" if path.name.endswith("tokenizer.json") else "tokenised text"
        raise RunFolderError(
            f"{path} is not the {kind} that {folder.path} was trained with: expected {_said(expected)}, "
            f"got {_said(found)}; it is another run's or damaged: copy it again"
        )


def check_prepared(folder: RunFolder) -> None:
    """Check that all prepared files are still as they were; this reads every file once."""
    prepared = read_prepared(folder)
    for name in prepared.get("files", {}):
        check_file(folder.path / name, folder, prepared)


def _said(sums: Mapping[str, Any]) -> str:
    return f"{sums['bytes']} bytes of checksum {sums['crc32']}"
