"""`Measure`: from a table of documents to a table of statistics, with a row for each head of each document."""

from dataclasses import dataclass
from typing import Any

from regard.corpus.settings import MeasureSettings, extra_package


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
