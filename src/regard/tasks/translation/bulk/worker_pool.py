"""Processes that share the sentences of a file among themselves, each with one thread and a model of its own.

The matrices of a translator are small: two threads on one product wait for each other longer than they compute, while
two processes on two batches never wait. "Decoding fast" in the documentation has figures.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch

from regard import errors
from regard.errors import ArgumentError, RegardError, WorkerError
from regard.generation.protocol import Hypothesis
from regard.tasks.translation.search_job import SearchJob
from regard.text.lines import raw_lines

LINES_FOR_WORKERS = 4_096
"""A file with fewer lines is translated before processes have started and imported torch."""
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(2**28),
    "MALLOC_MMAP_MAX_": "0",
}
"""The environment of a worker: one thread, and an allocator that keeps freed memory, as in `regard.cli.main`."""


class Workers(AbstractContextManager["Workers"]):
    """Processes that have loaded a run and search on demand.

    Args:
        folder: the run, as `Translator.load` reads it.
        count: how many processes to start.
        checkpoint: "best" or "last".
        ensemble: the other runs of an ensemble.
        memories: the files of the memories that they ask.

    Raises:
        ArgumentError: the count is below 1.
        RegardError: a process could not load the run; the error is the one that was raised there.
        WorkerError: a process did not start.
    """

    longest = None
    """What the model takes."""

    def __init__(
        self,
        folder: Path | str,
        count: int,
        *,
        checkpoint: str = "best",
        ensemble: Sequence[Path | str] = (),
        memories: Sequence[Path | str] = (),
    ) -> None:
        if count < 1:
            raise ArgumentError(f"workers must be at least 1, got {count}")
        self._all: list[_Worker] = []
        self._threads = ThreadPoolExecutor(count)
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        try:
            self._all += [_Worker(number, count) for number in range(1, count + 1)]
            folders, files = ([str(Path(one).resolve()) for one in some] for some in ((folder, *ensemble), memories))
            load = {"load": [folders, checkpoint, files]}
            list(self._threads.map(lambda worker: worker.ask(load), self._all))
        except BaseException:
            self.close()
            raise
        for worker in self._all:
            self._idle.put(worker)

    def search(self, jobs: Iterable[SearchJob]) -> list[list[list[Hypothesis]]]:
        """The hypotheses of each job's sentences, in the order of the jobs.

        Raises:
            RegardError: a job failed; the error is the one that was raised in the process.
            WorkerError: a process ended, or raised an error that is not regard's.
        """
        try:
            return list(self._threads.map(self._ask_one, list(jobs)))
        except BaseException:  # Ctrl-C too: nobody wants the answers that are still to come
            self.close()
            raise

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._all:
            worker.stop()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask_one(self, job: SearchJob) -> list[list[Hypothesis]]:
        worker = self._idle.get()
        try:
            found = worker.ask({"job": job.plain()})["found"]
        finally:
            self._idle.put(worker)
        return [[Hypothesis(tokens, score) for tokens, score in best] for best in found]


def workers_for(input: Path | None, wanted: int | None, device: torch.device) -> int:
    """How many processes are to share a file's lines; 0 if this process is to translate alone.

    Raises:
        ArgumentError: fewer than one process is wanted, or several are and the model is not on the CPU.
    """
    if wanted is not None and wanted < 1:
        raise ArgumentError(f"workers must be at least 1, got {wanted}")
    if device.type != "cpu":
        if (wanted or 1) > 1:
            raise ArgumentError(f"workers share the work on the CPU, and the model is on {device}: give --device cpu")
        return 0
    if wanted is not None:
        return wanted if wanted > 1 else 0
    if cores() < 2 or input is None or not input.is_file():
        return 0
    is_long = sum(1 for _ in islice(raw_lines(input), LINES_FOR_WORKERS)) == LINES_FOR_WORKERS
    return cores() if is_long else 0


def cores() -> int:
    """How many cores this process may use: ranks on one machine share its cores."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(here // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


@contextmanager
def sharing(
    translator: Any,
    folder: Path | str,
    count: int,
    *,
    ensemble: Sequence[Path | str] = (),
    memories: Sequence[Path | str] = (),
) -> Iterator[None]:
    """Let `count` processes search for a `Translator` that was loaded from `folder`; with 0 it searches itself.

    Args:
        translator: the one for which they search.
        folder: where it was loaded from.
        count: how many processes.
        ensemble: the other runs from which it was loaded.
        memories: the files of the memories that it was loaded with.

    Raises:
        WorkerError: a process did not start.
    """
    if count == 0:
        yield
        return
    settings: dict[str, Any] = {"ensemble": ensemble, "memories": memories}
    with Workers(folder, count, **settings) as translator.searcher:
        try:
            yield
        finally:
            translator.searcher = None


class _Worker:
    """One process, and the pipes to it."""

    def __init__(self, number: int, count: int) -> None:
        self._name = f"worker {number} of {count}"
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by stop)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "regard.tasks.translation.bulk.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            encoding="utf-8",
            env={**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for the process that started this one
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with suppress(OSError, ValueError):  # the pipe was closed at the other end, or by stop
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise WorkerError(f"{self._name} ended {self._end()}: with fewer workers there is more memory for each")
        answer = json.loads(line)
        if "error" in answer:
            kind, message = answer["error"]
            own = getattr(errors, kind, None)
            if isinstance(own, type) and issubclass(own, RegardError):
                raise own(message)
            raise WorkerError(f"{self._name}: {kind}: {message}")
        return answer

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._complaints):
            with suppress(OSError, ValueError):
                if stream is not None:
                    stream.close()

    def _end(self) -> str:
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "its answers"
        if status < 0:
            return f"by signal {-status}"
        self._complaints.seek(0)
        last = self._complaints.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        return f"with status {status}" + (f" ({last})" if last else "")
