"""What preparing the text of a run leaves, written down last: counts, fingerprints, and the checksum of every file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import RunFolderError
from regard.storage.sealed import checksum_of_file, read_sealed, write_sealed
from regard.tasks.runs.run_folder import RunFolder


def write_prepared(folder: RunFolder, record: Mapping[str, Any]) -> None:
    """Write prepared.json, which says that the text is ready; the tokenizers and all of data/ are complete by now.

    Raises:
        OSError: the disk is full or the folder cannot be written to.
    """
    paths = [*folder.path.glob("*tokenizer.json"), *(path for path in folder.data.rglob("*") if path.is_file())]
    files = {path.relative_to(folder.path).as_posix(): checksum_of_file(path) for path in sorted(paths)}
    write_sealed(folder.prepared_file, {**record, "files": files})


def read_prepared(folder: RunFolder) -> dict[str, Any]:
    """What `write_prepared` wrote down.

    Raises:
        RunFolderError: it is absent, cut short or altered.
    """
    return read_sealed(folder.prepared_file)


def check_file(path: Path, folder: RunFolder, prepared: Mapping[str, Any]) -> None:
    """Whether a file is still as it was when it was prepared; a run that has no checksums is taken as it is.

    Raises:
        RunFolderError: it is absent, cut short or altered.
    """
    expected = prepared.get("files", {}).get(path.relative_to(folder.path).as_posix())
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
    """Whether all that was prepared is still as it was; reads every file once.

    Raises:
        RunFolderError: a file is absent, cut short or altered; names the first.
    """
    prepared = read_prepared(folder)
    for name in prepared.get("files", {}):
        check_file(folder.path / name, folder, prepared)


def _said(sums: Mapping[str, Any]) -> str:
    return f"{sums['bytes']} bytes of checksum {sums['crc32']}"
