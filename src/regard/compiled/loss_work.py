"""What the compiled loop of the loss is told: one record with the addresses of logits, targets and losses.

Compiled code that several threads start at once takes one pointer, so that everything is in one record.
"""

import numpy as np

WORK = np.dtype(
    [(name, np.int64) for name in ("rows", "columns", "counter", "logits", "targets", "losses", "is_half", "wanted")]
    + [("smoothing", np.float64)],
    align=True,
)
"""One call.

    rows, columns   how many logits there are; rows follow one another in memory
    counter         the address of the next share that no thread has taken
    logits          their address, which is that of their gradient if it is `wanted`
    targets         the address of one index a row (int64), each in 0..columns-1
    losses          the address of one float64 a row, which is written
    is_half         whether the logits are bfloat16; else they are float32
    smoothing       the share e in 0..1 of the target's mass that is spread over all columns
"""
