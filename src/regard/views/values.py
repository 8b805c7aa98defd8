"""From an attention map to the numbers of a picture: the one door of `heatmap` and `page`.

A map longer than `max_cells` is pooled while it is read, block of rows by block of rows, so that
nothing of size T x S is ever held. Pooling is exact: "max" keeps the largest weight of a block,
"mass" sums over the keys of a block and averages over its queries, so that rows still sum to 1.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from regard.errors import ArgumentError, NonFiniteError, ShapeError
from regard.views.labels import axis_labels

Pooling = Literal["max", "mass"]

# Weights held at a time while a map is read: 32 MB in float64.
BLOCK_WEIGHTS = 2**22


class Picture(NamedTuple):
    """Weights that are ready to draw: (rows, columns) values with a label each."""

    values: npt.NDArray[np.floating[Any]]
    rows: list[str]
    columns: list[str]
    block: tuple[int, int]
    """Queries and keys that one value stands for; (1, 1) where nothing was pooled."""


def picture(
    weights: Any,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    max_cells: int = 256,
    pooling: Pooling = "max",
) -> Picture:
    """Read one map, checked, labelled, and pooled where a side is longer than `max_cells`.

    Args:
        weights: (T, S), a tensor, an array or an `AttentionMap`: T queries down, S keys across.
        rows: T labels, or None for positions from 0.
        columns: S labels, or None for positions from 0.
        max_cells: most values on a side, in tokens.
        pooling: what a block of weights becomes: its largest weight, or its mass.

    Returns:
        The values in the dtype of the weights (float32 for bf16 and fp16) with their labels.

    Raises:
        ShapeError: `weights` is not a non-empty matrix of real numbers, or has not one label a token.
        ArgumentError: a label is not a string; `max_cells` or `pooling` is out of range.
        NonFiniteError: a weight is NaN or infinite; the message says where.

    >>> picture(torch.eye(4), ["a", "b", "c", "d"], max_cells=2).rows
    ['a…b', 'c…d']
    """
    if max_cells < 1:
        raise ArgumentError(f"max_cells must be at least 1; got {max_cells}")
    if pooling not in ("max", "mass"):
        raise ArgumentError(f"pooling must be 'max' or 'mass'; got {pooling!r}")
    num_rows, num_columns = _matrix_shape(weights)
    row_labels = axis_labels(rows, num_rows, "rows")
    column_labels = axis_labels(columns, num_columns, "columns")
    block = -(-num_rows // max_cells), -(-num_columns // max_cells)
    values = np.concatenate([_pool(part, block, pooling) for part in _row_blocks(weights, block[0])])
    return Picture(values, _block_labels(row_labels, block[0]), _block_labels(column_labels, block[1]), block)


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


def _row_blocks(weights: Any, multiple: int) -> Iterator[npt.NDArray[np.floating[Any]]]:
    """The matrix as blocks of rows, each but the last a multiple of `multiple` rows."""
    num_rows, num_columns = weights.shape
    step = max(1, BLOCK_WEIGHTS // (num_columns * multiple)) * multiple
    for first in range(0, num_rows, step):
        # An AttentionMap computes exactly this block; a tensor or an array gives a view.
        yield _finite(_array(weights[first : first + step, 0:num_columns]), first)


def _array(values: Any) -> npt.NDArray[np.floating[Any]]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        # NumPy has no bf16, and half precision is too coarse to sum in.
        values = (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).numpy()
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise ShapeError(f"weights must be real numbers; got dtype {array.dtype}")
    return array.astype(np.result_type(array.dtype, np.float32), copy=False)


def _finite(values: npt.NDArray[np.floating[Any]], first: int) -> npt.NDArray[np.floating[Any]]:
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise NonFiniteError(f"weights must be finite; {values[row, column]} came at query {first + row}, key {column}")
    return values


def _pool(
    values: npt.NDArray[np.floating[Any]], block: tuple[int, int], pooling: Pooling
) -> npt.NDArray[np.floating[Any]]:

    if block == (1, 1):
        return values
    starts_down, starts_across = (np.arange(0, n, step) for n, step in zip(values.shape, block, strict=True))
    if pooling == "max":
        return np.maximum.reduceat(np.maximum.reduceat(values, starts_across, axis=1), starts_down, axis=0)
    mass = np.add.reduceat(np.add.reduceat(values, starts_across, axis=1), starts_down, axis=0)
    return mass / np.diff(np.append(starts_down, len(values)))[:, None]


def _block_labels(labels: list[str], step: int) -> list[str]:
    """One label a block: its first and its last token."""
    if step == 1:
        return labels
    ends = ((labels[first], labels[min(first + step, len(labels)) - 1]) for first in range(0, len(labels), step))
    return [first if first == last else f"{first}…{last}" for first, last in ends]
