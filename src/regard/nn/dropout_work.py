"""The input of dropout's compiled loops: one record with addresses, keys and a scale.

Compiled code on several threads takes one pointer.
"""

import numpy as np

SHARE = 1 << 14
"""The elements a thread takes at a time: its input and output fit its caches."""
MASKED, RELU, SUM, OF_RELU = 0, 1, 2, 3
"""The operations: y kept scale; max(y, 0) kept scale; x + y kept scale; and y scale where x is above 0."""

STEP, FIRST, SECOND, THIRD = 0x9E3779B1, 0xED5AD4BB, 0xAC4C1B51, 0x31848BAB
WORK = np.dtype(
    [(name, np.int64) for name in ("kind", "count", "counter", "x", "y", "answer", "x_half", "y_half", "answer_half")]
    + [(name, np.uint32) for name in ("key", "second_key", "least")]
    + [("scale", np.float32)],
    align=True,
)
"""One call.

    kind            one of those above
    count           how many numbers there are
    counter         the address of the next share that no thread has taken
    x, y, answer    addresses of numbers that follow one another; x is 0 where the kind has none
    x_half, ...     whether they are bfloat16; else they are float32
    key, second_key what the random bits of a number depend on, beside its place
    least           a number is kept if its 32 random bits are at least this
"""
