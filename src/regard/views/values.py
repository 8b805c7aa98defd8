"""The values of a picture from an attention map, for both `heatmap` and `page`.

A map longer than `max_cells` is pooled while it is read, without ever holding T x S elements. The map divides itself
into blocks (`regard.maps.statistics.pooling`), and pooling is exact: "max" keeps the largest weight of a block, "mass"
sums over the keys of a block and averages over its queries, so that rows still sum to 1.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from regard.errors import ArgumentError, NonFiniteError, ShapeError
from regard.maps.attention_map import AttentionMap
from regard.maps.statistics.pooling import Bins, Grid
from regard.views.labels import axis_labels

Pooling = Literal["max", "mass"]
"""How a block of weights becomes one value: the largest weight, or the sum over keys averaged over queries."""

BLOCK_WEIGHTS = 2**22
"""Weights of an array read at a time: 32 MB in float64."""


class Picture(NamedTuple):
    values: npt.NDArray[np.floating[Any]]
    rows: list[str]
    columns: list[str]
    grid: Grid

    @property
    def block(self) -> tuple[int, int]:
        """The most queries and keys of one value; (1, 1) without pooling."""
        return self.grid.rows.largest, self.grid.columns.largest

    @property
    def is_even(self) -> bool:
        return all(bins.length % bins.count == 0 for bins in (self.grid.rows, self.grid.columns))


def picture(
    weights: Any,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    max_cells: int = 256,
    pooling: Pooling = "max",
) -> Picture:
    """One map (T, S) in the dtype of its weights (float32 for bf16 and fp16), pooled if a side is over `max_cells`; of
    a map with statistics only, the finest recorded picture."""
    if max_cells < 1:
        raise ArgumentError(f"max_cells must be at least 1; got {max_cells}")
    if pooling not in ("max", "mass"):
        raise ArgumentError(f"pooling must be 'max' or 'mass'; got {pooling!r}")
    num_rows, num_columns = _matrix_shape(weights)
    row_labels = axis_labels(rows, num_rows, "rows")
    column_labels = axis_labels(columns, num_columns, "columns")
    if isinstance(weights, AttentionMap):
        values, grid = _pooled_map(weights, max_cells, pooling)
    else:
        grid = Grid.at_most(max_cells, max_cells, num_rows, num_columns)
        values = _pooled_array(weights, grid, pooling)
    if pooling == "mass":
        values = values / grid.rows.sizes(torch.device("cpu")).numpy().astype(values.dtype)[:, None]
    return Picture(values, _block_labels(row_labels, grid.rows), _block_labels(column_labels, grid.columns), grid)


def _matrix_shape(weights: Any) -> tuple[int, int]:
    if not hasattr(weights, "shape"):
        raise ShapeError(f"weights must be an AttentionMap, a tensor or an array; got {type(weights).__name__}")
    shape = tuple(weights.shape)
    if len(shape) != 2:
        raise ShapeError(
            f"weights must be one map of shape (queries, keys); got {shape}: name the batch and the head "
            "first, as in weights[0, 3]"
        )
    if 0 in shape:
        raise ShapeError(f"weights must hold at least one query and one key; got shape {shape}")
    return shape


def _pooled_map(weights: AttentionMap, max_cells: int, pooling: Pooling) -> tuple[npt.NDArray[np.floating[Any]], Grid]:
    how: Literal["max", "sum"] = "max" if pooling == "max" else "sum"
    grid = weights.grid(max_cells, max_cells, how)
    values = _array(weights.detach().pooled(grid.rows.count, grid.columns.count, how))
    require_finite(values, grid)
    return values, grid


def _pooled_array(weights: Any, grid: Grid, pooling: Pooling) -> npt.NDArray[np.floating[Any]]:
    parts = []
    for rows in _row_blocks(grid):
        read = _array(weights[rows.start : rows.stop, 0 : grid.columns.length])
        whole = Grid(Bins(len(rows), len(rows)), Bins(grid.columns.length, grid.columns.length))
        require_finite(read, whole, first=rows.start)
        # torch rejects negative strides, and warns of read-only arrays.
        tensor = torch.from_numpy(np.require(read, requirements=["C", "W"]))
        parts.append(grid.reduce(tensor, rows.start, 0, largest=pooling == "max").numpy())
    return np.concatenate(parts)


def _row_blocks(grid: Grid) -> Iterator[range]:
    """All rows, in ranges of whole blocks of at most BLOCK_WEIGHTS weights (or one block)."""
    blocks = grid.rows.ranges()
    step = max(1, BLOCK_WEIGHTS // (grid.columns.length * grid.rows.largest))
    for first in range(0, len(blocks), step):
        some = blocks[first : first + step]
        yield range(some[0].start, some[-1].stop)


def _array(values: Any) -> npt.NDArray[np.floating[Any]]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        # NumPy has no bf16, and sums in half precision are too coarse.
        values = (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).numpy()
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise ShapeError(f"weights must be real numbers; got dtype {array.dtype}")
    # torch has no floats wider than float64.
    dtype = np.result_type(array.dtype, np.float32)
    return array.astype(dtype if dtype.itemsize <= 8 else np.float64, copy=False)


def require_finite(
    values: npt.NDArray[np.floating[Any]], grid: Grid, *, whose: str = "weights", first: int = 0
) -> None:
    """Raise NonFiniteError for a picture, (rows, columns) or (heads, rows, columns), whose first query is `first`."""
    if np.isfinite(values).all():
        return
    *head, row, column = place = tuple(int(at) for at in np.argwhere(~np.isfinite(values))[0])
    query, key = first + grid.rows.edge(row), grid.columns.edge(column)
    where = "".join(f"in head {at} " for at in head)
    among = "" if grid.is_whole else ", or at another weight of that block"
    raise NonFiniteError(f"{whose} must be finite; {values[place]} came {where}at query {query}, key {key}{among}")


def _block_labels(labels: list[str], bins: Bins) -> list[str]:
    ends = ((labels[block.start], labels[block.stop - 1]) for block in bins.ranges())
    if bins.largest == 1:
        return labels
    return [first if first == last else f"{first}…{last}" for first, last in ends]
