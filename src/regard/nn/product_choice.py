"""Which way a product with fixed weights is computed: what decides about it.

MKL with the weights as they are, MKL with their transpose, or oneDNN with the weights in its own order: each is two to
four times as slow as another on some processor. The ways are timed once for each size and number of rows, in at most
100 ms for one model (`regard.storage.choices`).
"""

import torch
from torch import Tensor

ROWS = (1, 5, 32)
"""The numbers of rows that are timed: one sentence, the hypotheses of one, and a batch."""
FEW = (1, 8)
"""Up to so many rows are counted as one, and as few."""


def rows_counted_as(rows: int) -> int:
    """The number of rows in ROWS by which a product is chosen.

    >>> [rows_counted_as(rows) for rows in (1, 2, 8, 9, 400)]
    [1, 5, 5, 32, 32]
    """
    return ROWS[0] if rows <= FEW[0] else ROWS[1] if rows <= FEW[1] else ROWS[2]


def product_kind(weight: Tensor, rows: int) -> str:
    """What decides which way is fastest on one machine.

    >>> product_kind(torch.ones(8, 4), 5).partition(", threads")[0]
    '5 x 4 -> 8, float32'
    """
    outputs, inputs = weight.shape
    dtype = str(weight.dtype).removeprefix("torch.")
    return f"{rows} x {inputs} -> {outputs}, {dtype}, threads: {torch.get_num_threads()}"
