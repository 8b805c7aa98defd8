"""A shard of a corpus is measured, and its files are written: in this process, a worker or a task of an engine."""

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from regard.corpus.documents import Shard
from regard.corpus.examples import Examples
from regard.corpus.folder import StatisticsFolder
from regard.corpus.measured_document import CorpusCounts
from regard.corpus.reading import measure_documents
from regard.corpus.settings import CorpusJob
from regard.corpus.tables import heads_table, write_parquet
from regard.corpus.totals import totals_of

AHEAD = 2
"""Shards that wait for each worker, so that none is idle."""


def measure_shard(job: CorpusJob, shard: Shard, settings: dict[str, Any]) -> CorpusCounts:
    """Measure a shard and write its files; in the process of a worker too."""
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
    record = CorpusCounts(len(found), tokens, table.num_rows, len(errors), "".join(errors[:1]))
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
