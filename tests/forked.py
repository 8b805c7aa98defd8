"""Processes that begin with torch and the program imported: a server imports them once, and forks for each.

Such a process is one of its own like any other: it has computed nothing, is killed, interrupted and waited for. Only
the three seconds of imports are not its own; `tests/test_signals.py` and the tests of `torchrun` start real ones.

Windows cannot fork, and macOS not once torch has begun its threads: there `run` and `run_ranks` start real ones too.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import IO, Any

from tests import ROOT

PROGRAM = "regard.cli.main:program"
CALL = """
import sys
from importlib import import_module
sys.argv = sys.argv[1:]
module, _, function = sys.argv[0].partition(":")
getattr(import_module(module), function)()
"""
"""What a process does that is not forked."""
NUMBER = 12
"""The bytes in which the server tells a number."""
IMPORTED = (
    "lightning_fabric",
    "regard.cli.commands",
    "regard.tasks.language_modelling.train",
    "regard.tasks.translation.train",
    "rich.progress",
    "safetensors.torch",
    "tests.training.many_ranks",
    "tests.training.toy_training",
    "tokenizers",
    "torch.utils.tensorboard",
)


class Forked:
    """A process that calls a function, as `subprocess.Popen` is one that runs a file; its output goes to files.

    Args:
        arguments: follow the name of the program in `sys.argv`.
        function: "module:function", the program unless given.
        imported: the modules that the process begins with.
        more: variables added to the environment.
    """

    def __init__(self, *arguments: str, function: str = PROGRAM, imported: Any = IMPORTED, **more: str) -> None:
        self.returncode: int | None = None
        self._out, self._err = _nameless_file(), _nameless_file()
        self._told, teller = os.pipe()
        request = {
            "argv": [function, *arguments],
            "cwd": os.getcwd(),
            "environment": {**os.environ, "OMP_NUM_THREADS": "1", **more},
        }
        message = json.dumps(request).encode()
        server = _server(imported)
        server.sendall(len(message).to_bytes(4) + message)
        socket.send_fds(server, [b"."], [self._out, self._err, teller])
        os.close(teller)
        self.pid = self._number()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self.returncode = self._number()
            os.close(self._told)
        return self.returncode

    def wait(self, timeout: float = 180.0) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"it did not end within {timeout} seconds; it said: {self.texts()}")
            select.select([self._told], [], [], 1.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 180.0) -> tuple[str, str]:
        self.wait(timeout)
        return self.texts()

    def texts(self) -> tuple[str, str]:
        out, err = (os.pread(file, os.fstat(file).st_size, 0).decode() for file in (self._out, self._err))
        return out, err

    def __del__(self) -> None:
        for file in (self._out, self._err, *([self._told] if self.returncode is None else [])):
            os.close(file)

    def _number(self) -> int:
        return int(os.read(self._told, NUMBER) or b"-9")  # a watcher never ends without a word


class Started:
    """The same without a server and without signals, for other systems than Linux."""

    def __init__(self, *arguments: str, function: str = PROGRAM, imported: Any = (), **more: str) -> None:
        self._files = [tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2)]  # noqa: SIM115  (by _whole)
        self._process = subprocess.Popen(
            [sys.executable, "-c", CALL, function, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path(), **more},
        )

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def communicate(self, timeout: float = 180.0) -> tuple[str, str]:
        self._process.wait(timeout)
        out, err = (_whole(file) for file in self._files)
        return out, err


PROCESS = Forked if sys.platform == "linux" else Started


def _whole(file: IO[str]) -> str:
    with file:
        file.seek(0)
        return file.read()


def _path() -> str:
    return os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path])


def _nameless_file() -> int:
    file, path = tempfile.mkstemp()
    os.unlink(path)
    return file


def run(*arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    process = PROCESS(*arguments, **how)
    out, err = process.communicate()
    assert process.returncode is not None
    return subprocess.CompletedProcess(list(arguments), process.returncode, out, err)


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    return run(code, function="tests.forked:execute", imported=("torch",))


def execute() -> None:
    exec(compile(sys.argv[1], "<code>", "exec"), {"__name__": "__main__"})


def run_ranks(count: int, *arguments: str, function: str = PROGRAM) -> list[subprocess.CompletedProcess[str]]:
    ranks = start_ranks(count, *arguments, function=function)
    said = [rank.communicate() for rank in ranks]
    return [
        subprocess.CompletedProcess(list(arguments), rank.returncode or 0, *texts)
        for rank, texts in zip(ranks, said, strict=True)
    ]


def start_ranks(count: int, *arguments: str, **how: Any) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    return [
        PROCESS(*arguments, **how, **both, MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(count)
    ]


@cache
def _server(imported: tuple[str, ...]) -> socket.socket:
    """The connection to the server that has imported these, which ends when this process does."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno()), *imported],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path()},
            pass_fds=[theirs.fileno()],
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(connection: socket.socket, imported: Sequence[str]) -> None:
    import torch

    torch.set_num_threads(1)
    for name in imported:
        import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the watchers
    while header := connection.recv(4, socket.MSG_WAITALL):
        request = json.loads(connection.recv(int.from_bytes(header), socket.MSG_WAITALL))
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
        if os.fork() == 0:
            connection.close()
            _watch(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _watch(request: dict[str, Any], descriptors: list[int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, status = descriptors
    child = os.fork()
    if child == 0:
        os.close(status)
        _be(request, streams)
    os.write(status, b"%*d" % (NUMBER, child))
    _, how = os.waitpid(child, 0)
    os.write(status, b"%*d" % (NUMBER, os.waitstatus_to_exitcode(how)))
    os._exit(0)


def _be(request: dict[str, Any], streams: Sequence[int]) -> None:
    status = 1
    try:
        for number, descriptor in enumerate([os.open(os.devnull, os.O_RDONLY), *streams]):
            os.dup2(descriptor, number)
            os.close(descriptor)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = request["argv"]
        module, _, function = sys.argv[0].partition(":")
        getattr(import_module(module), function)()
        status = 0
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as mine:
        _serve(mine, sys.argv[2:])
