"""The numbers of a model's heads on one document, and the counts of many documents."""

from typing import Any, NamedTuple

from regard.lazy import displayed
from regard.tasks.viewing.view_input import said_of_unknown


class LayerNumbers(NamedTuple):
    layer: int
    heads: Any
    """The numbers of the heads, (H,)."""
    numbers: Any
    """(H, statistics) of float32; NaN where no query counts."""
    top_keys: list[list[int]] | None


class MeasuredDocument(NamedTuple):
    id: str
    n_tokens: int | None
    layers: list[LayerNumbers]
    error: str | None = None
    n_unknown: int = 0
    """The tokens that stand for text outside the vocabulary."""


@displayed
class CorpusCounts(NamedTuple):
    """The counts of a shard, or of a whole corpus."""

    documents: int = 0
    tokens: int = 0
    rows: int = 0
    """Those of `heads/`."""
    errors: int = 0
    """The documents that could not be measured."""
    first_error: str = ""
    unknown: int = 0
    """The tokens that stand for text outside the vocabulary."""

    def plus(self, later: "CorpusCounts") -> "CorpusCounts":
        """The counts of both.

        >>> CorpusCounts(documents=2).plus(CorpusCounts(3, errors=1, first_error="d4: no text"))
        CorpusCounts(documents=5, tokens=0, rows=0, errors=1, first_error='d4: no text', unknown=0)
        """
        documents, tokens, rows, errors = (one + other for one, other in zip(self[:4], later[:4], strict=True))
        first, unknown = self.first_error or later.first_error, self.unknown + later.unknown
        return CorpusCounts(documents, tokens, rows, errors, first, unknown)

    def __str__(self) -> str:
        failed = f"; {self.errors:,} could not be measured, the first: {self.first_error}" if self.errors else ""
        strange = f"; {said_of_unknown(self.unknown, self.tokens)}" if self.unknown else ""
        return f"{self.documents:,} documents, {self.tokens:,} tokens, {self.rows:,} rows{strange}{failed}"
