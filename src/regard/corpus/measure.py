"""`Measure`: from a table of documents to a table of statistics, with a row for each head of each document."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from regard.corpus.measured_document import CorpusCounts
from regard.corpus.settings import CorpusEngine, CorpusJob, MeasureSettings, extra_package
from regard.errors import require
from regard.files.model_folder import OnProgress, no_progress


@dataclass(frozen=True)
class Measure(MeasureSettings):
    """The statistics of every head on every document of a table, for `map_batches` of an engine or by itself.

    It holds names and numbers alone, so that it can be pickled. The model is loaded in the process of the first call,
    once. A document is one forward pass, without padding and on a fixed number of threads: its rows have the same bits
    alone, in any table, and on any number of workers.

    Args:
        model: a folder that transformers loads, or a run of a language model.
        statistics: columns of the answer. Means over the queries of a document, as in `regard.watching.head_table`:
            entropy, distance, self, previous, first, induction, duplicate; top_weight, the largest weight of a query.
            Of the keys: received, the largest share of all attention that one key gets; top_keys, the keys that get
            most. One's own, "module:function": a function of the map (H, T, S) and the tokens (S,) that returns a
            number for each head (H,), or one for each query (H, T), of which the mean is taken; such as the mass under
            a mask, `lambda weights, tokens: weights.mass(regard.window(8))`.
        text: the column of the texts.
        id: the column of the ids, texts or whole numbers. Without it, ids are the numbers of the rows.
        layers: the layers to measure, from 0, or from -1 backwards; all unless given.
        heads: the heads to measure, likewise.
        max_tokens: longer documents are cut; None reads all, and a document too long for the model is an error.
        keys: how many keys top_keys has.
        threads: torch's threads. Another number may change the last bits.
        device: auto, cpu, cuda, cuda:N or mps.

    Raises:
        ArgumentError: a statistic is unknown, or a number is out of range.

    >>> Measure("gpt2", ["entropy", "top_keys"], max_tokens=512).statistics
    ('entropy', 'top_keys')
    """

    @property
    def schema(self) -> Any:
        """The `pyarrow.Schema` of the answers, for engines that ask for it first."""
        extra_package("pyarrow", extra="measure")
        from regard.corpus.tables import heads_schema

        return heads_schema(self)

    def __call__(self, table: Any) -> Any:
        """Measure the documents of a `pyarrow.Table`.

        Args:
            table: has the text column, and perhaps the id column.

        Returns:
            A table in the order of the documents, then of layers and heads: id, n_tokens, layer, head, a float32 column
            for each statistic (null where no query counts), top_keys, error. A document that cannot be measured has one
            row, with the error, and without layer and head.

        Raises:
            ArgumentError: there is no text column, or no such layer, head or device.
            RunFolderError: the folder of the model cannot be read.
            NotSeenError: the model has no attention.
            MissingExtraError: pyarrow is not installed.
        """
        extra_package("pyarrow", extra="measure")
        from regard.corpus.documents import documents_of
        from regard.corpus.reading import measure_documents
        from regard.corpus.tables import heads_table

        return heads_table(self, list(measure_documents(self, documents_of(table, text=self.text, id=self.id))))


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
        shard_documents: the most documents of a shard. An interruption loses one at most; a file of heads/ holds one.
        examples: the documents kept in examples/ for each head and statistic.
        max_errors: stop when more documents than that cannot be measured; None never stops.
        engine: "processes", or "ray": Ray shares out the shards, here or on the cluster of RAY_ADDRESS.
        tell: is called after each shard with the name of the work, the documents measured, and those in all.

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
