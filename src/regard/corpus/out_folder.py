"""Whether a folder may be written to, before anything is read."""

from pathlib import Path
from typing import Any

from regard.errors import ArgumentError, DataError, RunFolderError
from regard.files.atomic import is_temporary, refuse_links
from regard.files.untrusted import parse_toml

SETTINGS_FILE, SUCCESS = "run.toml", "_SUCCESS"
FOLDERS = ("heads", "totals", "examples", "_parts", "_done")


def refuse_out(path: Path, *, resume: bool) -> None:
    """Refuse a folder that holds something else, or statistics that are not to be gone on with."""
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is a file; name a folder (--out)")
    if holds_statistics(path):
        refuse_links(*(path / name for name in (*FOLDERS, SETTINGS_FILE, SUCCESS)))
        if not resume:
            raise ArgumentError(
                f"{path} already holds statistics: go on with them (--resume), or name another folder (--out)"
            )
    elif path.is_dir() and any(not is_temporary(one) and not _is_first_step(one) for one in path.iterdir()):
        raise ArgumentError(f"{path} is not empty and holds no statistics; name another folder (--out)")


def holds_statistics(path: Path) -> bool:
    return (path / SETTINGS_FILE).is_file() and (path / "_done").is_dir()


def settings_of(path: Path) -> dict[str, Any]:
    try:
        return parse_toml((path / SETTINGS_FILE).read_bytes())
    except DataError as error:
        said = f"{path / SETTINGS_FILE} is {error}; copy it again, or measure into another folder (--out)"
        raise RunFolderError(said) from None


def _is_first_step(path: Path) -> bool:
    return path.name == "_done" and path.is_dir() and not path.is_symlink() and not any(path.iterdir())
