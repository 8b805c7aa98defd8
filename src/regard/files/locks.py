"""Locks for one writing process at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import lock_descriptor

from regard.errors import RunFolderError
from regard.files.atomic import OPENS_FOLDERS


@contextmanager
def locked(folder: Path, *, refusal: str) -> Iterator[None]:
    """Hold the lock of `folder` while the block runs.

    The operating system locks the folder itself, so the lock leaves no file and ends with the process. Windows cannot
    open folders: there it locks a file beside it, `.run.lock` for `run`.

    Raises:
        RunFolderError: another process has the lock; the message is `refusal`.

    >>> with locked(Path("."), refusal="already locked"), locked(Path("."), refusal="already locked"):
    ...     pass
    Traceback (most recent call last):
    regard.errors.RunFolderError: already locked
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
    """Hold the lock of `folder` after its earlier holders; without locks (Windows, some network disks), at once."""
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
    """Lock an open file or folder until it is closed or the process ends. Some network disks have no locks."""
    try:
        is_ours = lock_descriptor(descriptor, blocking=False)
    except OSError:
        return
    if not is_ours:
        raise RunFolderError(refusal)
