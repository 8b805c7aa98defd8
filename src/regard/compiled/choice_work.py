"""What the compiled choice of a search is told: one record with the addresses of logits, offsets and answers.

Compiled code that several threads start at once takes one pointer, so that everything is in one record.
"""

import numpy as np

WORK = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("counter", "groups", "members", "columns", "row_stride", "wanted"),
            *("logits", "offsets", "values", "places"),
        )
    ],
    align=True,
)
"""One call.

    counter         the address of the next group that no thread has taken
    groups, members how many groups there are, and how many rows each of them has
    columns         the logits of a row, of which the next row begins `row_stride` further on
    wanted          how many numbers of each group are chosen, at most as many as it has
    logits          the address of the first row, float32
    offsets         the address of one number for each row, float32
    values, places  the addresses of `wanted` answers for each group, float32 and int64, which are written
"""
