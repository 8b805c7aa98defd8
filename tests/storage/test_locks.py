"""Locks of the operating system: one process at a time, and none that outlives its process."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from regard.errors import RunFolderError
from regard.files import locks
from regard.files.locks import locked

HOLDER = """
import sys
from pathlib import Path
from regard.files.locks import locked
with locked(Path(sys.argv[1]), refusal="no"):
    print("mine", flush=True)
    sys.stdin.read()  # until the test ends
"""


@contextmanager
def held_by_another_process(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mine\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    with held_by_another_process(tmp_path) as process:
        with pytest.raises(RunFolderError, match=r"^wait for it$"), locked(tmp_path, refusal="wait for it"):
            pass
        process.kill()
        assert process.wait() != 0
        with locked(tmp_path, refusal="wait for it"):
            pass
    assert not list(tmp_path.iterdir())  # no file was made for it


@pytest.mark.skipif(os.name == "nt", reason="Windows does not list the open files of a process")
def test_a_lock_ends_with_its_block_however_that_ends(tmp_path: Path) -> None:
    def interrupted() -> None:
        with locked(tmp_path, refusal="no"):
            with pytest.raises(RunFolderError, match="no"), locked(tmp_path, refusal="no"):
                pass
            raise KeyboardInterrupt

    descriptors = len(os.listdir("/dev/fd"))
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    assert len(os.listdir("/dev/fd")) == descriptors


def test_where_there_are_no_locks_nobody_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(_descriptor: int, *, blocking: bool) -> bool:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(locks, "lock_descriptor", unsupported)
    with locked(tmp_path, refusal="no"), locked(tmp_path, refusal="no"):
        pass
