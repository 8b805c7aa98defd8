"""The numbers of a model's heads on one document."""

from typing import Any, NamedTuple


class LayerNumbers(NamedTuple):
    """The statistics of a layer's heads on a document."""

    layer: int
    heads: Any
    """The numbers of the heads, (H,)."""
    numbers: Any
    """(H, statistics) of float32; NaN where no query counts."""
    top_keys: list[list[int]] | None


class MeasuredDocument(NamedTuple):
    """The statistics of all chosen heads on a document, or why there are none."""

    id: str
    n_tokens: int | None
    layers: list[LayerNumbers]
    error: str | None = None
