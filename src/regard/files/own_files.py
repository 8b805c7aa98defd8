"""Checks before a file of ours is written or removed. Links are never followed, as they may lead to a foreign file."""

import os
from pathlib import Path

from regard.errors import RunFolderError
from regard.files.atomic import write_atomically


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

    >>> [is_file_below(name) for name in ("data/train.tokens", "../x", "/etc/passwd", "", ".", "a/../../b")]
    [True, False, False, False, False, False]
    """
    parts = name.split("/")
    return not {"", ".", ".."} & set(parts) and "\0" not in name and "\\" not in name


def part_from_other_names(path: Path) -> None:
    """Break the hard links of a file by copying it, so that writing leaves the other names unchanged."""
    if path.exists() and path.stat().st_nlink > 1:
        write_atomically(path, path.read_bytes())


def remove_empty(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()
