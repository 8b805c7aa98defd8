"""`measure_corpus`: every document of a corpus, into a folder of Parquet files."""

from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path

from regard.corpus.measured_document import CorpusCounts
from regard.corpus.settings import CorpusEngine, CorpusJob, MeasureSettings
from regard.errors import require
from regard.tasks.progress import OnProgress, no_progress


def measure_corpus(
    measure: MeasureSettings,
    data: str | PathLike[str] | Sequence[str | PathLike[str]],
    out: str | PathLike[str],
    *,
    resume: bool = False,
    workers: int | None = None,
    shard_documents: int = 500,
    examples: int = 5,
    max_errors: int | None = None,
    engine: CorpusEngine = "processes",
    tell: OnProgress = no_progress,
) -> CorpusCounts:
    """Measure every head on every document of a corpus, into a folder: `regard measure` calls this function.

    The bytes of the files are the same on any number of workers and ranks, and after any interruption. On the ranks of
    torchrun all must call it.

    Args:
        measure: the model and its statistics, a `Measure`.
        data: files, folders or patterns such as `shards/*.parquet`: Parquet, Arrow (a folder of `datasets`), JSON
            lines, or text with a document on each line; packed or not.
        out: a folder to make; `regard.corpus.atlas` and `compare_statistics` read it.
        resume: go on with a folder that was begun with the same settings.
        workers: processes, each with the model; None is one for each core, or one on a GPU.
        shard_documents: the most documents of a shard: what an interruption loses, and a file of heads/.
        examples: the documents kept in examples/ for each head and statistic.
        max_errors: stop when more documents than that cannot be measured; None never stops.
        engine: "processes", or "ray": Ray shares out the shards, here or on the cluster of RAY_ADDRESS.
        tell: is called after each shard with what is done, how many documents, and of how many.

    Returns:
        The counts of documents, tokens, rows and errors, those of earlier runs of the folder too.

    Raises:
        ArgumentError: a number is out of range, there are no such files, they have no text column or an id twice, or
            the folder holds something else or was begun with other settings.
        DataError: a file is damaged, or there are too many errors.
        RunFolderError: another process has the folder, or the model cannot be read.
        EngineError: a worker died.
        FileError: the folder cannot be written to.
        MissingExtraError: pyarrow is not installed, or the engine.

    >>> from regard.corpus import Measure
    >>> measure_corpus(Measure("gpt2"), "shards/*.parquet", "stats", workers=0)
    Traceback (most recent call last):
    regard.errors.ArgumentError: workers must be at least 1, got 0
    """
    require(measure, MeasureSettings, "measure", "MeasureSettings")
    named = [fspath(one) for one in ([data] if isinstance(data, str | PathLike) else data)]
    job = CorpusJob(
        measure, tuple(named), Path(out), resume=resume, workers=workers, examples=examples,
        shard_documents=shard_documents, max_errors=max_errors, engine=engine,
    )  # fmt: skip
    job.check()
    from regard.corpus.engine import run_job

    return run_job(job, tell)
