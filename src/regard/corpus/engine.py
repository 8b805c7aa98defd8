"""Measure a corpus into a folder: in this process, in workers of this machine, and on the ranks of torchrun."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from regard.corpus.documents import CheckedCorpus, Shard, check_corpus, input_files, shards
from regard.corpus.folder import StatisticsFolder
from regard.corpus.identity import identity
from regard.corpus.measured_document import CorpusCounts
from regard.corpus.reading import own_function
from regard.corpus.settings import CorpusJob
from regard.corpus.shard_work import AHEAD, measure_shard, records_of
from regard.errors import DataError, EngineError, RegardError, RunFolderError
from regard.files.model_folder import is_huggingface
from regard.tasks.progress import OnProgress
from regard.tasks.training.distributed.devices import find_device, join_ranks
from regard.tasks.training.distributed.ranks import Ranks

START = "forkserver" if sys.platform == "linux" else "spawn"
"""How workers start: forked from a process that has imported torch and computed nothing, where that is safe."""


@dataclass(slots=True)
class WorkDone:
    total: int
    tell: OnProgress
    most_errors: int | None
    counts: CorpusCounts = field(default_factory=CorpusCounts)
    _begun: float = 0.0
    _before: int = 0

    def begin(self) -> None:
        self._begun, self._before = time.monotonic(), self.counts.documents

    def add(self, record: CorpusCounts) -> None:
        self.counts = so_far = self.counts.plus(record)
        if self.most_errors is not None and so_far.errors > self.most_errors:
            raise DataError(
                f"{so_far.errors:,} document{'s' * (so_far.errors > 1)} could not be measured, and "
                f"{self.most_errors:,} are allowed; the first: {so_far.first_error}"
            )
        done = so_far.documents - self._before
        if self._begun and done:
            left = (time.monotonic() - self._begun) / done * (self.total - so_far.documents)
            told = f"{so_far.tokens:,} tokens, {timedelta(seconds=round(left))} left; documents"
            self.tell(told, so_far.documents, self.total)


def run_job(job: CorpusJob, tell: OnProgress) -> CorpusCounts:
    """See `regard.corpus.measure_corpus`."""
    device = find_device(job.measure.device)
    join_ranks(torch.device("cpu"))
    ranks = Ranks(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    folder, measure = StatisticsFolder(job.out), job.measure
    for name in measure.numbers:
        if ":" in name:
            own_function(name)
    files = input_files(job.data)
    corpus = check_corpus(files, text=measure.text, id=measure.id, size=job.shard_documents)
    settings = identity(measure, corpus, shard_documents=job.shard_documents, examples=job.examples)
    progress = WorkDone(corpus.documents, tell, job.max_errors)
    holds = folder.open(settings, resume=job.resume)
    _agree(ranks, holds.__enter__ if ranks.rank == 0 else None)
    try:
        _work(job, folder, ranks, files, corpus, progress, settings, 1 if device.type != "cpu" else None)
        of_ranks = ranks.gather(lambda: progress.counts)
        if ranks.rank == 0:
            folder.merge(corpus.shards, statistics=_told(settings), most=job.examples)
        ranks.gather(lambda: None)
    finally:
        if ranks.rank == 0:
            holds.__exit__(*sys.exc_info())
    return reduce(CorpusCounts.plus, (CorpusCounts(*one) for one in of_ranks))


def _agree(ranks: Ranks, begin: Any) -> None:
    """Begin on the first rank; where it refuses, all do."""

    def work() -> str:
        try:
            if begin is not None:
                begin()
        except RegardError as error:
            if ranks.world_size == 1:
                raise
            return str(error)
        return ""

    if refused := "".join(ranks.gather(work)):
        raise RunFolderError(refused)


def _told(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "files"}


def _work(
    job: CorpusJob, folder: StatisticsFolder, ranks: Ranks, files: list[Path], corpus: CheckedCorpus,
    progress: WorkDone, settings: dict[str, Any], usual: int | None,
) -> None:  # fmt: skip
    is_finished = folder.success.exists()
    found = {number: folder.done(number) for number in ranks.share_out(range(corpus.shards))}
    for record in found.values():
        if record is not None:
            progress.add(record)
    progress.begin()
    todo = {number for number, record in found.items() if record is None}
    if not todo or is_finished:
        return
    of_shards = shards(files, text=job.measure.text, id=job.measure.id, size=job.shard_documents)
    left = (shard for shard in of_shards if shard.number in todo)
    workers = usual if job.workers is None else job.workers
    if workers is None:
        workers = 1 if ranks.world_size > 1 else cores()
    told = _told(settings)
    if job.engine == "ray":
        from regard.corpus.shard_work import in_ray

        for record in in_ray(job, left, told):
            progress.add(record)
    elif workers == 1 or len(todo) == 1:
        for shard in left:
            progress.add(measure_shard(job, shard, told))
    else:
        for record in _in_workers(job, left, told, min(workers, len(todo))):
            progress.add(record)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_workers(
    job: CorpusJob, left: Iterator[Shard], settings: dict[str, Any], workers: int
) -> Iterator[CorpusCounts]:
    before, context = set(multiprocessing.active_children()), multiprocessing.get_context(START)
    if START == "forkserver":
        context.set_forkserver_preload([__name__, *["transformers"] * is_huggingface(Path(job.measure.model))])
    pool = ProcessPoolExecutor(workers, context, _begin_worker)

    def submit(shard: Shard) -> Future[CorpusCounts]:
        with _no_script():
            return pool.submit(measure_shard, job, shard, settings)

    try:
        yield from records_of(submit, left, AHEAD * workers)
        pool.shutdown()
    except BrokenProcessPool:
        raise EngineError(
            "a worker was killed, perhaps because the memory was full: go on with --resume, and fewer --workers"
        ) from None
    finally:
        # After an error nobody waits for the shards that are being measured.
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _no_script() -> Iterator[None]:
    """Workers that start in the block do not run the script of this process anew: they need nothing of it."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its workers
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
