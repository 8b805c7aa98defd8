"""The input of the compiled attention over short sequences: one record with addresses, strides and sizes.

Compiled code on several threads takes one pointer.
"""

import numpy as np

FORWARD, BACKWARD = 0, 1
TENSORS = ("query", "key", "value", "output", "lse", "added", "grad", "grad_query", "grad_key", "grad_value")
"""The tensors with an address and strides; the last four belong to the backward pass."""
AXES = ("batch", "head", "row")
"""The strides of a tensor. The last axis is contiguous."""

WORK = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("kind", "counter", "batch", "heads", "queries", "keys", "width", "is_causal", "is_half"),
            *TENSORS,
            *(f"{tensor}_{axis}" for tensor in TENSORS for axis in AXES),
        )
    ]
    + [("scale", np.float32)],
    align=True,
)
"""One call.

    kind            FORWARD or BACKWARD
    counter         the address of the next share that no thread has taken
    batch, ...      the sizes; `width` is that of the heads, a multiple of LANES
    is_causal       whether query i sees the keys up to i
    is_half         whether query, key, value, output and their gradients are bfloat16; else they are float32
    query, ...      addresses; 0 where the kind has no such tensor, or where nothing is added
    query_batch ... strides in elements of the tensor
    added           the additions to the scores, float32 (batch, heads, queries, keys), -inf for excluded keys
    lse             the logarithm of the sum of exponentials, float32 (batch, heads, queries)
    scale           the factor of the scores
"""
