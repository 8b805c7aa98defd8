"""Locks that let one process at a time write to some files: two would overwrite each other's files by turns."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import lock_descriptor

from regard.errors import RunFolderError
from regard.files.atomic import OPENS_FOLDERS


@contextmanager
def locked(folder: Path, *, refusal: str) -> Iterator[None]:
    """Keep out other processes that lock the same `folder`, while the block runs.

    The operating system locks the folder itself. So the lock leaves no file, and it ends when the process ends in any
    way. On Windows, which opens no folders, a file beside the folder is locked: `.run.lock` for `run`.

    Raises:
        RunFolderError: another process has the lock; the message is `refusal`.

    >>> with locked(Path("."), refusal="somebody is here"), locked(Path("."), refusal="somebody is here"):
    ...     pass
    Traceback (most recent call last):
    regard.errors.RunFolderError: somebody is here
    """
    beside = folder.absolute().with_name(f".{folder.absolute().name}.lock")
    descriptor = os.open(folder, os.O_RDONLY) if OPENS_FOLDERS else os.open(beside, os.O_RDWR | os.O_CREAT)
    try:
        lock(descriptor, refusal=refusal)
        yield
    finally:
        os.close(descriptor)
        if not OPENS_FOLDERS:
            with suppress(OSError):  # another process has it open
                beside.unlink()


@contextmanager
def locked_in_turn(folder: Path) -> Iterator[None]:
    """Keep out other processes that lock the same `folder` while the block runs; wait for those that came before.

    Where there are no such locks, as on Windows and on some network disks, nobody waits.
    """
    if not OPENS_FOLDERS:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            lock_descriptor(descriptor, blocking=True)
        yield
    finally:
        os.close(descriptor)


def lock(descriptor: int, *, refusal: str) -> None:
    """Lock an open file or folder, until it is closed or the process ends.

    Some network disks have no such locks; there nobody is kept out.

    Raises:
        RunFolderError: another process has the lock; the message is `refusal`.
    """
    try:
        is_ours = lock_descriptor(descriptor, blocking=False)
    except OSError:
        return
    if not is_ours:
        raise RunFolderError(refusal)
