"""A run's own export for CTranslate2, made once and kept in the run folder.

run/ctranslate2/engine.json     its origin, and the checksum of each file
run/ctranslate2/model.bin ...   the files of `to_ctranslate2`

The export is that of a model by its content: the fingerprints of weights and tokenizers, the settings and the versions
of those that write it, never a date.
`engine.json` is removed first and written last, so that a process that dies in between leaves an export that the next
one makes anew.
"""

import errno
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from regard.errors import RunFolderError
from regard.files.atomic import (
    checksum_of_file,
    naming,
    read_checksummed,
    refuse_links,
    remove_empty,
    rename,
    to_disk,
    write_checksummed,
)
from regard.files.locks import locked_in_turn
from regard.tasks.exports.ctranslate2 import library, to_ctranslate2
from regard.tasks.exports.trained import ExportedRun
from regard.tasks.runs.run_folder import ENGINE, ENGINE_FILES, REPLACEMENT
from regard.tasks.runs.serialisation import to_plain
from regard.tensors.fingerprint import fingerprint
from regard.version import __version__

FORMAT = 2
"""The version of engine.json, and of how an export is written: other files from the same model need another number."""
RECORD = ENGINE_FILES[0]
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
"""The errors of a folder this process may only read."""
T = TypeVar("T")


def _content(trained: ExportedRun) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "regard": __version__,
        "ctranslate2": library().__version__,
        "model": fingerprint(trained.model),
        "settings": to_plain(trained.config),
        "tokenizers": [one.fingerprint() for one in trained.tokenizers],
        "positions": trained.max_length,
    }


def with_kept_export(trained: ExportedRun, run: Path, use: Callable[[Path], T]) -> T:
    """Call `use` with the folder of the run's export, which is made if it is absent, damaged or of another model.

    A read-only run folder keeps no export: it is made in a temporary folder, for this call alone.
    """
    folder, content = run / ENGINE, _content(trained)
    refuse_links(folder)  # files of these names behind it would be replaced
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file where a run has a folder: move it away")
    try:
        folder.mkdir(exist_ok=True)
        with locked_in_turn(folder):
            if not _is_whole(folder, content):
                _make(trained, content, folder)
            return use(folder)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        with tempfile.TemporaryDirectory() as other:
            to_ctranslate2(trained, Path(other))
            return use(Path(other))
    finally:
        with suppress(OSError):
            remove_empty(folder)


def _is_whole(folder: Path, content: Mapping[str, Any]) -> bool:
    try:
        record = read_checksummed(folder / RECORD)
        files = record.pop("files")
        return record == content and all(
            name in ENGINE_FILES and checksum_of_file(folder / name) == checksum for name, checksum in files.items()
        )
    except (RunFolderError, OSError, KeyError, AttributeError):
        return False


def _make(trained: ExportedRun, content: Mapping[str, Any], folder: Path) -> None:
    half_done = folder / REPLACEMENT
    shutil.rmtree(half_done, ignore_errors=True)  # a process was killed here
    half_done.mkdir()
    try:
        with naming(half_done):
            to_ctranslate2(trained, half_done)
        files = {path.name: checksum_of_file(path) for path in sorted(half_done.iterdir())}
        assert set(files) < set(ENGINE_FILES), files
        for name in ENGINE_FILES:
            (folder / name).unlink(missing_ok=True)
        for name in files:
            with (half_done / name).open("rb+") as file:  # Windows brings only files that may be written to the disk
                to_disk(file)
            rename(half_done / name, folder / name)
        write_checksummed(folder / RECORD, {**content, "files": files})
    finally:
        shutil.rmtree(half_done, ignore_errors=True)
