"""For each head and statistic the documents in which it is strongest, and the place in each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import torch

from regard.corpus.measured_document import LayerNumbers
from regard.tasks.pictures.token_maps import AxisLabels
from regard.watching.analysis.head_table import QueryValues, TopOfQueries

BEFORE, AFTER = 48, 16
"""The tokens around the place that are kept."""
STRONGEST = 16
"""The most keys of the place that are kept."""
SCHEMA = pa.schema(
    [
        ("layer", pa.int32()), ("head", pa.int32()), ("statistic", pa.string()), ("rank", pa.int32()),
        ("value", pa.float32()), ("id", pa.string()), ("query", pa.int32()), ("at_query", pa.float32()),
        ("start", pa.int32()), ("tokens", pa.list_(pa.string())), ("keys", pa.list_(pa.int32())),
        ("key_tokens", pa.list_(pa.string())), ("weights", pa.list_(pa.float32())),
    ]
)  # fmt: skip
"""value: the statistic of the head on the document; query: the position where it is largest, and at_query its value
there; tokens: the text around the query, from position `start` on; keys, key_tokens, weights: the keys that it attends
to most, from the largest weight down."""

HeadPlace = tuple[int, int, str]
"""Layer, head, statistic."""
Axes = tuple[AxisLabels, AxisLabels]
"""The labels of queries and keys."""


@dataclass(slots=True)
class Examples:
    """The `most` strongest documents of each head and statistic so far; of equal ones the earliest."""

    most: int
    _of: dict[tuple[Any, ...], list[dict[str, Any]]] = field(default_factory=dict)

    def add(
        self, id: str, part: LayerNumbers, by_query: Mapping[str, QueryValues], top: TopOfQueries, axes: Axes, keys: int
    ) -> None:
        """Take a layer's heads (H, T, keys) on a document in where they are stronger than on those so far."""
        found = [one for name, value in by_query.items() for one in self._stronger(part, name, value)]
        if not found:
            return
        heads, queries = (torch.tensor([one[n] for one in found]) for n in (1, 2))
        weights, places = (one[heads, queries].cpu() for one in top)
        rows, columns = axes
        labels = columns if columns is not None else [str(n) for n in range(keys)]
        offset = keys - (len(rows) if rows is not None else keys)
        for (place, _, query, value, there), row, where in zip(found, weights.tolist(), places.tolist(), strict=True):
            start = min(max(query + offset - BEFORE, 0), max(keys - BEFORE - AFTER, 0))
            seen = [key for key in where if key >= 0]
            one = {
                "value": value, "id": id, "query": query, "at_query": there, "start": start,
                "tokens": labels[start : start + BEFORE + AFTER], "keys": seen,
                "key_tokens": [labels[key] for key in seen], "weights": row[: len(seen)],
            }  # fmt: skip
            self._take(place, one)

    def _stronger(
        self, part: LayerNumbers, name: str, values: QueryValues
    ) -> Iterable[tuple[HeadPlace, int, int, float, float]]:
        largest, queries = values.values.where(values.counted, -torch.inf).max(-1)
        columns = (part.heads, values.mean().float(), queries, largest.float())
        for row, (head, value, query, there) in enumerate(zip(*(one.tolist() for one in columns), strict=True)):
            place = part.layer, head, name
            if value == value and self._enters(place, value):
                yield place, row, query, value, there

    def _enters(self, place: Sequence[Any], value: float) -> bool:
        kept = self._of.get(tuple(place), [])
        return len(kept) < self.most or bool(value > kept[-1]["value"])

    def _take(self, place: HeadPlace, one: dict[str, Any]) -> None:
        kept = self._of.setdefault(place, [])
        at = next((n for n, other in enumerate(kept) if one["value"] > other["value"]), len(kept))
        kept.insert(at, one)
        del kept[self.most :]

    def merge(self, table: Any) -> None:
        # Rows become Python objects where they are stronger than those so far: of a long corpus few are.
        columns = (table.column(name).to_pylist() for name in ("layer", "head", "statistic", "value"))
        stronger = [n for n, (*place, value) in enumerate(zip(*columns, strict=True)) if self._enters(place, value)]
        for one in table.take(pa.array(stronger, pa.int64())).to_pylist():
            place = (one.pop("layer"), one.pop("head"), one.pop("statistic"))
            if self._enters(place, one["value"]):
                self._take(place, one)

    def table(self) -> Any:
        rows = [
            {**one, "layer": layer, "head": head, "statistic": name, "rank": rank}
            for (layer, head, name), kept in sorted(self._of.items())
            for rank, one in enumerate(kept)
        ]
        return pa.Table.from_pylist(rows, schema=SCHEMA)
