"""Sums over documents that may be added: count, sum, sum of squares and a histogram for each head and statistic."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

DECADES, PER_DECADE = (-6, 6), 8
EDGES = 10.0 ** (np.arange((DECADES[1] - DECADES[0]) * PER_DECADE + 1) / PER_DECADE + DECADES[0])
"""The edges of the bins, from 1e-6 to 1e6, evenly in the logarithm. Bin 0 has all that is smaller, zeros too, and the
last bin all that is larger."""
BINS = len(EDGES) + 1
SUMS = ("count", "sum", "sum_of_squares")
SCHEMA = pa.schema(
    [
        ("layer", pa.int32()), ("head", pa.int32()), ("statistic", pa.string()), ("count", pa.int64()),
        ("sum", pa.float64()), ("sum_of_squares", pa.float64()), ("histogram", pa.list_(pa.int64())),
    ]
)  # fmt: skip


def totals_of(heads: Any, statistics: Sequence[str]) -> Any:
    """The totals of a table of heads, by layer, head and statistic. Documents count where they have the number."""
    known = heads.filter(heads.column("layer").is_valid())
    layer, head = (known.column(name).to_numpy().astype(np.int64) for name in ("layer", "head"))
    kinds, which = np.unique(np.stack([layer, head], -1), axis=0, return_inverse=True)
    which, parts = which.reshape(-1), []
    for name in statistics:
        column = known.column(name)
        there = column.is_valid().to_numpy()
        values, rows = column.to_numpy()[there].astype(np.float64), which[there]
        bins = rows * BINS + np.searchsorted(EDGES, values, side="right")
        sums = (
            np.bincount(rows, minlength=len(kinds)),
            *(np.bincount(rows, one, len(kinds)) for one in (values, values**2)),
        )
        histogram = np.bincount(bins, minlength=len(kinds) * BINS).reshape(len(kinds), BINS)
        parts.append(_table(kinds, [name] * len(kinds), sums, histogram))
    return _in_order(pa.concat_tables(parts)) if parts else SCHEMA.empty_table()


def merged_totals(tables: Iterable[Any]) -> Any:
    """Add totals in the order in which they come."""
    rows: dict[tuple[int, int, str], int] = {}
    sums, histogram = [np.zeros(0, np.int64), np.zeros(0), np.zeros(0)], np.zeros((0, BINS), np.int64)
    for table in tables:
        keys = zip(*(table.column(name).to_pylist() for name in ("layer", "head", "statistic")), strict=True)
        places = np.array([rows.setdefault(key, len(rows)) for key in keys], np.int64)
        if more := len(rows) - len(histogram):
            sums = [np.pad(one, (0, more)) for one in sums]
            histogram = np.pad(histogram, ((0, more), (0, 0)))
        for one, name in zip(sums, SUMS, strict=True):
            one[places] += table.column(name).to_numpy()
        histogram[places] += np.array(table.column("histogram").to_pylist(), np.int64).reshape(-1, BINS)
    kinds = np.array([key[:2] for key in rows], np.int64).reshape(-1, 2)
    return _in_order(_table(kinds, [name for *_, name in rows], sums, histogram))


def _table(kinds: Any, names: Sequence[str], sums: Sequence[Any], histogram: Any) -> Any:
    columns = [pa.array(kinds[:, n], pa.int32()) for n in range(2)]
    columns += [pa.array(names, pa.string()), *map(pa.array, sums), pa.array(list(histogram), pa.list_(pa.int64()))]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _in_order(table: Any) -> Any:
    return table.sort_by([("layer", "ascending"), ("head", "ascending"), ("statistic", "ascending")])
