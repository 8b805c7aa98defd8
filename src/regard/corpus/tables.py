"""The tables of statistics as Arrow and Parquet have them, and their totals, sums over documents that may be added."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from regard.corpus.measured_document import MeasuredDocument
from regard.corpus.settings import MeasureSettings
from regard.files.atomic import file_errors, replacing

ROW_GROUP_BYTES = 2**26
"""About the size in memory of a row group."""
METADATA = b"regard"
"""The key of Parquet's metadata with the settings, as JSON."""


def heads_schema(measure: MeasureSettings) -> Any:
    keys = [("top_keys", pa.list_(pa.int32()))] if "top_keys" in measure.statistics else []
    return pa.schema(
        [
            ("id", pa.string()), ("n_tokens", pa.int32()), ("layer", pa.int32()), ("head", pa.int32()),
            *((name, pa.float32()) for name in measure.numbers), *keys, ("error", pa.string()),
        ]
    )  # fmt: skip


def heads_table(measure: MeasureSettings, documents: Sequence[MeasuredDocument]) -> Any:
    schema = heads_schema(measure)
    rows = [max(1, sum(len(part.heads) for part in one.layers)) for one in documents]
    of_row = np.repeat(np.arange(len(documents)), rows)
    failed = np.array([one.error is not None for one in documents], bool)[of_row]
    width = len(measure.numbers)
    numbers = [np.full((len(of_row), width), np.nan, np.float32)]
    layers, heads = (np.zeros(len(of_row), np.int32) for _ in range(2))
    keys: list[Any] = []
    at = 0
    for one in documents:
        for part in one.layers:
            span = slice(at, at := at + len(part.heads))
            layers[span], heads[span], numbers[0][span] = part.layer, part.heads, part.numbers
            keys += part.top_keys or ()
        if not one.layers:
            keys.append(None)
            at += 1
    columns = [
        pa.array([one.id for one in documents], pa.string()).take(pa.array(of_row)),
        pa.array([one.n_tokens for one in documents], pa.int32()).take(pa.array(of_row)),
        pa.array(layers, mask=failed),
        pa.array(heads, mask=failed),
        *(pa.array(column, mask=np.isnan(column)) for column in np.ascontiguousarray(numbers[0].T)),
        *([pa.array(keys, pa.list_(pa.int32()))] if "top_keys" in measure.statistics else []),
        pa.array([one.error for one in documents], pa.string()).take(pa.array(of_row)),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def write_parquet(path: Path, table: Any, settings: Mapping[str, Any]) -> None:
    table = table.replace_schema_metadata({METADATA: json.dumps(settings, sort_keys=True)})
    rows = max(1, int(ROW_GROUP_BYTES * table.num_rows / max(table.nbytes, 1)))
    with file_errors(path), replacing(path) as file:
        parquet.write_table(table, file, compression="zstd", row_group_size=rows)


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
