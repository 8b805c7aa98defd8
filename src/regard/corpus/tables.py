"""The tables of statistics as Arrow and Parquet have them."""

import json
from collections.abc import Mapping, Sequence
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
    """The columns of `heads/`."""
    keys = [("top_keys", pa.list_(pa.int32()))] if "top_keys" in measure.statistics else []
    return pa.schema(
        [
            ("id", pa.string()), ("n_tokens", pa.int32()), ("layer", pa.int32()), ("head", pa.int32()),
            *((name, pa.float32()) for name in measure.numbers), *keys, ("error", pa.string()),
        ]
    )  # fmt: skip


def heads_table(measure: MeasureSettings, documents: Sequence[MeasuredDocument]) -> Any:
    """A row for each head of each document; one row for a document with an error."""
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
    """Write a table with zstd, whole and in one step, with the settings in its metadata."""
    table = table.replace_schema_metadata({METADATA: json.dumps(settings, sort_keys=True)})
    rows = max(1, int(ROW_GROUP_BYTES * table.num_rows / max(table.nbytes, 1)))
    with file_errors(path), replacing(path) as file:
        parquet.write_table(table, file, compression="zstd", row_group_size=rows)
