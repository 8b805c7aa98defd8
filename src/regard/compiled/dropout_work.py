"""What the compiled loops of dropout are told: one record with addresses, keys and a scale.

Compiled code that several threads start at once takes one pointer, so that everything is in one record.
"""

import numpy as np

SHARE = 1 << 14
"""The numbers that a thread takes at a time: what it reads and writes stays in its caches."""
MASKED, RELU, SUM, OF_RELU, BIASED_RELU, OF_RELU_IN_PLACE = 0, 1, 2, 3, 4, 5
"""The kinds of work: y kept scale; max(y, 0) kept scale; x + y kept scale; and y scale where x is above 0.

The last two change float32 numbers of `answer` in their place, rows of `columns` numbers. BIASED_RELU makes them
max(answer + x, 0) kept scale, where x is one row. OF_RELU_IN_PLACE makes them answer scale where x is above 0, and
writes to y one row for each share: the sums of the share's numbers in each column.
"""

STEP, FIRST, SECOND, THIRD = 0x9E3779B1, 0xED5AD4BB, 0xAC4C1B51, 0x31848BAB
"""The factors of the hash that makes the random bits of a place."""

WORK = np.dtype(
    [(name, np.int64) for name in ("kind", "count", "counter", "x", "y", "answer", "x_half", "y_half", "answer_half")]
    + [("columns", np.int64)]
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
    columns         how many numbers a row has, for the kinds that work in place; else 0
    key, second_key what the random bits of a number depend on, beside its place
    least           a number is kept if its 32 random bits are at least this
"""
