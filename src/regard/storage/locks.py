"""One process at a time: two that train in one folder would take turns in replacing each other's checkpoints."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.errors import RunFolderError


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes that ask for the same out of `folder` while the block runs.

    The lock is the operating system's, on the folder itself: it leaves no file, and ends with the process however
    that ends. Where there are no such locks (Windows, some network disks), nobody is kept out.

    Raises:
        RunFolderError: another process has it.

    >>> with locked(Path(".")), locked(Path(".")):
    ...     pass
    Traceback (most recent call last):
    regard.errors.RunFolderError: another process is training in .: wait for it, stop it, or name another folder (--out)
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise RunFolderError(
                    f"another process is training in {folder}: wait for it, stop it, or name another folder (--out)"
                ) from None
        yield
    finally:
        os.close(descriptor)
