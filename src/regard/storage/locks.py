"""One process at a time: two that write to the same files would take turns in replacing each other's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import lock_descriptor

from regard.errors import RunFolderError


@contextmanager
def locked(folder: Path, *, refusal: str) -> Iterator[None]:
    """Keep other processes that ask for the same out of `folder` while the block runs.

    The lock is the operating system's, on the folder itself: it leaves no file, and ends with the process however
    that ends.

    Raises:
        RunFolderError: another process has the lock; it says `refusal`.

    >>> with locked(Path("."), refusal="somebody is here"), locked(Path("."), refusal="somebody is here"):
    ...     pass
    Traceback (most recent call last):
    regard.errors.RunFolderError: somebody is here
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor, refusal=refusal)
        yield
    finally:
        os.close(descriptor)


def lock(descriptor: int, *, refusal: str) -> None:
    """Lock a file or folder that is open, until it is closed or the process ends.

    On disks that have no such locks (some network disks), nobody is kept out.

    Raises:
        RunFolderError: another process has the lock; it says `refusal`.
    """
    try:
        is_ours = lock_descriptor(descriptor, blocking=False)
    except OSError:
        return
    if not is_ours:
        raise RunFolderError(refusal)
