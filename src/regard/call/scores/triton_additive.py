"""The Triton programs for additive scores, forward and backward; needs Triton.

A pair's A hidden units exist only in registers: the forward writes one score for each pair, and the backward recomputes
the hidden units from queries and keys.
"""

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    # tl has no tanh; for large values exp2 gives infinity or 0, and this 1 or -1.
    return 1.0 - 2.0 / (1.0 + tl.exp2(2.8853900817779268 * x))


@triton.jit
def add_scores(
    query, key, vector, scores, queries, keys, hidden,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """scores (n, t, s) of query (n, t, A), key (n, s, A) and vector (A,), all contiguous and in float32."""
    row_blocks, column_blocks = tl.cdiv(queries, ROWS), tl.cdiv(keys, COLUMNS)
    number = tl.program_id(0)
    cell = (number // (row_blocks * column_blocks)).to(tl.int64)
    rows = number // column_blocks % row_blocks * ROWS + tl.arange(0, ROWS)
    columns = number % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, hidden, UNITS):
        units = start + tl.arange(0, UNITS)
        inside = units < hidden
        v = tl.load(vector + units, mask=inside, other=0.0)
        q = tl.load(
            query + (cell * queries + rows)[:, None] * hidden + units[None, :],
            mask=(rows < queries)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        k = tl.load(
            key + (cell * keys + columns)[:, None] * hidden + units[None, :],
            mask=(columns < keys)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        total += tl.sum(_tanh(q[:, None, :] + k[None, :, :]) * v[None, None, :], 2)
    there = (rows < queries)[:, None] & (columns < keys)[None, :]
    tl.store(scores + (cell * queries + rows)[:, None] * keys + columns[None, :], total, mask=there)


@triton.jit
def pull_rows(
    one, other, vector, gradient, d_one, d_vector, count, length, hidden, row_step, column_step,
    FINDS_VECTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The gradient of one side, and of the vector: d_one_ia = v_a sum_j g_ij (1 - h_ija^2), d_va = sum_ij g_ij h_ija.

    Args:
        one: (n, count, A), the queries, or the keys.
        other: (n, length, A), the other ones.
        vector: (A,).
        gradient: g (n, t, s), contiguous; row_step and column_step lead from one row of `one`, and of `other`, to the
            next.
        d_one: (n, count, A), output.
        d_vector: (n * blocks of rows, A), output if FINDS_VECTOR.
    """
    row_blocks, unit_blocks = tl.cdiv(count, ROWS), tl.cdiv(hidden, UNITS)
    number = tl.program_id(0)
    cell = (number // (row_blocks * unit_blocks)).to(tl.int64)
    block = number // unit_blocks % row_blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    units = number % unit_blocks * UNITS + tl.arange(0, UNITS)
    inside, live = units < hidden, rows < count
    v = tl.load(vector + units, mask=inside, other=0.0)
    of_one = (cell * count + rows)[:, None] * hidden + units[None, :]
    x = tl.load(one + of_one, mask=live[:, None] & inside[None, :], other=0.0)
    total = tl.zeros([ROWS, UNITS], tl.float32)
    of_vector = tl.zeros([UNITS], tl.float32)
    for start in range(0, length, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        y = tl.load(
            other + (cell * length + columns)[:, None] * hidden + units[None, :],
            mask=(columns < length)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        g = tl.load(
            gradient + cell * count * length + rows.to(tl.int64)[:, None] * row_step + columns[None, :] * column_step,
            mask=live[:, None] & (columns < length)[None, :], other=0.0,
        )  # fmt: skip
        h = _tanh(x[:, None, :] + y[None, :, :])
        total += tl.sum(g[:, :, None] * (1.0 - h * h), 1)
        if FINDS_VECTOR:
            of_vector += tl.sum(tl.sum(g[:, :, None] * h, 1), 0)
    tl.store(d_one + of_one, total * v[None, :], mask=live[:, None] & inside[None, :])
    if FINDS_VECTOR:
        tl.store(d_vector + (cell * row_blocks + block) * hidden + units, of_vector, mask=inside)
