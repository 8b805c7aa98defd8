"""Measure a corpus into a folder: in this process, in workers of this machine, and on the ranks of torchrun."""

import hashlib
import inspect
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from regard.corpus.documents import CheckedCorpus, Shard, check_corpus, input_files, shards
from regard.corpus.examples import Examples
from regard.corpus.folder import StatisticsFolder
from regard.corpus.measured_document import CorpusCounts
from regard.corpus.reading import measure_documents, own_function
from regard.corpus.settings import CorpusJob, MeasureSettings, extra_package
from regard.corpus.tables import heads_table, totals_of, write_parquet
from regard.errors import DataError, EngineError, RegardError, RunFolderError
from regard.files.model_folder import OnProgress, is_huggingface
from regard.tasks.runs.run_folder import versions_of
from regard.tasks.training.distributed import Ranks, find_device, join_ranks, usable_cores

AHEAD = 2
"""Shards that wait for each worker, so that none is idle."""


def measure_shard(job: CorpusJob, shard: Shard, settings: dict[str, Any]) -> CorpusCounts:
    folder, examples = StatisticsFolder(job.out), Examples(job.examples)
    found = list(measure_documents(job.measure, shard.documents, examples))
    table = heads_table(job.measure, found)
    write_parquet(folder.part(shard.number), table, settings)
    write_parquet(folder.beside(shard.number, "totals"), totals_of(table, job.measure.numbers), settings)
    write_parquet(folder.beside(shard.number, "examples"), examples.table(), settings)
    said = [(one.id, one.error) for one in found if one.error is not None]
    # An id may be the place of a line, with which the reader's error begins too.
    errors = [error if error.startswith(f"{name}: ") else f"{name}: {error}" for name, error in said]
    tokens = sum(one.n_tokens or 0 for one in found)
    unknown = sum(one.n_unknown for one in found)
    record = CorpusCounts(len(found), tokens, table.num_rows, len(errors), "".join(errors[:1]), unknown)
    folder.finish_shard(shard.number, record)
    return record


def records_of(
    submit: Callable[[Shard], Future[CorpusCounts]], left: Iterator[Shard], most: int
) -> Iterator[CorpusCounts]:
    running: set[Future[CorpusCounts]] = set()
    for shard in left:
        running.add(submit(shard))
        if len(running) >= most:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (one.result() for one in done)
    while running:
        done, running = wait(running, return_when=FIRST_COMPLETED)
        yield from (one.result() for one in done)


RETRIES = 5
"""How often Ray runs a shard again whose process or machine has died. A shard writes the same bytes each time."""


def in_ray(job: CorpusJob, left: Iterator[Shard], settings: dict[str, Any]) -> Iterator[CorpusCounts]:
    ray = extra_package("ray", extra="ray")
    begins = not ray.is_initialized()
    if begins:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    # The device of this process, whose name is in run.toml.
    device = find_device(job.measure.device).type
    job = replace(job, measure=replace(job.measure, device=device))
    is_gpu = device != "cpu"
    task = ray.remote(num_cpus=job.measure.threads, num_gpus=int(is_gpu), max_retries=RETRIES)(measure_shard)
    room = ray.cluster_resources().get("GPU" if is_gpu else "CPU", 1) // (1 if is_gpu else job.measure.threads)

    def submit(shard: Shard) -> Future[CorpusCounts]:
        future: Future[CorpusCounts] = task.remote(job, shard, settings).future()
        return future

    try:
        # A cluster may grow: more tasks wait than it has room for now.
        yield from records_of(submit, left, AHEAD * max(int(room), job.workers or 1))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise EngineError(
            f"a shard could not be measured in {RETRIES + 1} tries ({str(error).splitlines()[0]:.200}); "
            "go on with --resume"
        ) from None
    finally:
        if begins:
            ray.shutdown()


FORMAT = 1
"""The version of the files of a folder of statistics."""
PACKAGES = ("regard", "torch", "transformers", "tokenizers", "numpy", "numba", "pyarrow")
WEIGHTS = (".safetensors", ".bin", ".pt")


def identity(measure: MeasureSettings, corpus: CheckedCorpus, *, shard_documents: int, examples: int) -> dict[str, Any]:
    """The settings of a folder of statistics, for run.toml; without `files` they are in each Parquet file too."""
    device, settings = find_device(measure.device), {name: getattr(measure, name) for name in SETTINGS}
    capability = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else torch.cuda.get_device_name(device)
    return {
        "format": FORMAT,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()},
        "max_tokens": measure.max_tokens or 0,
        "shard_documents": shard_documents,
        "examples": examples,
        "dtype": "float32",
        "device": device.type,
        "processor": f"{platform.machine()} {capability}",
        "model": hashes_of(Path(measure.model)),
        "functions": {
            name: _digest([Path(inspect.getfile(own_function(name)))]) for name in measure.statistics if ":" in name
        },
        "versions": {name: found or "none" for name, found in versions_of(PACKAGES).items()},
        "files": corpus.files,
    }


SETTINGS = ("statistics", "text", "id", "layers", "heads", "keys", "threads")


def hashes_of(folder: Path) -> dict[str, str]:
    if is_huggingface(folder):
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    else:
        files = [*sorted(folder.glob("*tokenizer.json")), folder / "config.json", folder / "best.safetensors"]
    weights = [path for path in files if path.suffix in WEIGHTS]
    settings = [path for path in files if path.name == "config.json"]
    return {
        "weights": _digest(weights),
        "tokenizer": _digest(
            path for path in files if path not in weights and path not in settings and _is_of_text(path)
        ),
        "configuration": _digest(settings),
    }


def _is_of_text(path: Path) -> bool:
    """Whether a file may be the tokenizer's: its names are many, so all but a few are taken."""
    return path.suffix in (".json", ".txt", ".model", ".spm") and "index" not in path.name


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


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
        workers = 1 if ranks.world_size > 1 else usable_cores()
    told = _told(settings)
    if job.engine == "ray":
        for record in in_ray(job, left, told):
            progress.add(record)
    elif workers == 1 or len(todo) == 1:
        for shard in left:
            progress.add(measure_shard(job, shard, told))
    else:
        for record in _in_workers(job, left, told, min(workers, len(todo))):
            progress.add(record)


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
        # After an error the rest returns without waiting for the shards that are being measured.
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
