"""What the compiled step of a decoder is told: a list of stages, each with the addresses of what it reads and writes.

Compiled code that several threads start at once takes one pointer, so that everything is in records.
"""

import numpy as np

MOST_ROWS = 8
"""The most hypotheses of one step: a beam."""
PRODUCT, NORM, ATTEND = 0, 1, 2
"""The kinds of stages."""

STAGE = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("kind", "source", "source_stride", "target", "target_stride"),
            *("inputs", "outputs", "weights", "bias", "plus", "is_half", "is_relu"),
            *("groups", "shared", "writes", "width", "length", "values_at"),
            *("keys", "values", "row_stride", "group_stride", "key_stride"),
        )
    ]
    + [("number", np.float64)],
    align=True,
)
"""One stage. Addresses are in bytes, and 0 where there is nothing; strides are in float32 numbers.

    kind            PRODUCT, NORM or ATTEND
    source, target  rows of float32, `source_stride` and `target_stride` apart
    PRODUCT         target = source W + bias + plus (whose rows are as far apart as the target's), with the matrix in
                    panels (inputs, PANEL); `is_half` says that they are bfloat16, `is_relu` that numbers below 0 are 0
    NORM            the layer norm of `inputs` numbers, with the weight `weights`, the bias `bias` and the epsilon
                    `number`
    ATTEND          for each of `groups` key heads: `shared` queries of `width` numbers each attend to `length` keys
                    and values, which are `key_stride` apart, those of the groups `group_stride`, and those
                    of the rows `row_stride`; scores are multiplied with
                    `number`. If `writes`, the source's keys stand after its queries, its values at `values_at`, and
                    both are first written as the last key and value.
"""

WORK = np.dtype([(name, np.int64) for name in ("counter", "done", "rows", "count", "stages")], align=True)
"""The rows of the step, the number of its stages and their address; and two addresses of counters: the next share of
the work that no thread has taken, and how many shares are done."""
