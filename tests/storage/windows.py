"""The refusals of Windows, refused here: for a process of its own, because nothing can take this back.

Windows opens no folders, removes and replaces no file that is open or mapped in memory, brings to the disk only files
that may be written to, and has fewer characters for the names of files. torch and pip do without all of this there.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

NOT_IN_NAMES = re.compile(r'[<>:"\\|?*\x00-\x1f]|[ .]$')
"""The characters that no file name has there."""


def refuse_as_windows_does(below: str) -> None:
    """Refuse it from now on for all files below a folder, whatever opens, renames or removes them in Python."""
    root, real_sync, flags = os.path.realpath(below), os.fsync, fcntl.fcntl

    def sync(fd: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        if stat.S_ISDIR(os.fstat(number).st_mode) or flags(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "it is not open for writing")
        real_sync(number)

    def ask(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = _absolute(arguments[0])
            if path.startswith(root):
                _check_name(path)
                if arguments[1] is None and os.path.isdir(path):  # by os.open
                    raise PermissionError(errno.EACCES, "it is a folder", path)
        elif event == "os.mkdir" and _absolute(arguments[0]).startswith(root):
            _check_name(_absolute(arguments[0]))
        elif event == "os.rename":
            source, target = map(_absolute, arguments[:2])
            if target.startswith(root):
                _check_name(target)
                _check_not_in_use(source, target)
                if os.path.isdir(target):
                    raise PermissionError(errno.EACCES, "there is a folder", target)
        elif event == "os.remove" and _absolute(arguments[0]).startswith(root):
            _check_not_in_use(_absolute(arguments[0]))

    setattr(shutil, "_use_fd_functions", False)  # noqa: B010  (or rmtree opens folders)
    setattr(tempfile, "TemporaryFile", tempfile.NamedTemporaryFile)  # noqa: B010  (as the module itself does there)
    os.fsync = sync
    sys.addaudithook(ask)


def _absolute(path: str | bytes) -> str:
    folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
    return os.path.join(os.path.realpath(folder), name)


def _check_name(path: str) -> None:
    if any(NOT_IN_NAMES.search(name) for name in path.split(os.sep) if name):
        raise OSError(errno.EINVAL, "no file has such a name", path)


def _check_not_in_use(*paths: str) -> None:
    for used in _in_use():
        for path in paths:
            if used == path or used.startswith(path + os.sep):
                raise PermissionError(errno.EACCES, f"{used} is in use", path)


def _in_use() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # that of the list itself
            continue
    descriptor = os.open("/proc/self/maps", os.O_RDONLY)
    with os.fdopen(descriptor, encoding="utf-8") as maps:
        yield from (line.rstrip("\n").split(maxsplit=5)[-1] for line in maps if os.sep in line)
