"""A shard of a corpus is measured, and its files are written: in this process, a worker, or a task of Ray."""

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any

from regard.corpus.documents import Shard
from regard.corpus.examples import Examples
from regard.corpus.folder import StatisticsFolder
from regard.corpus.measured_document import CorpusCounts
from regard.corpus.reading import measure_documents
from regard.corpus.settings import CorpusJob, extra_package
from regard.corpus.tables import heads_table, totals_of, write_parquet
from regard.errors import EngineError
from regard.tasks.training.distributed.devices import find_device

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
    """The records of shards as they are finished, with at most so many of them submitted and not yet finished."""
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
    """Measure shards in tasks of Ray, with as many at a time as the cluster has room for."""
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
