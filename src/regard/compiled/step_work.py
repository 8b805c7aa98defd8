"""What the compiled step of a decoder is told: a list of stages, each with the addresses of what it reads and writes.

Compiled code that several threads start at once takes one pointer, so that everything is in records.
"""

import numpy as np

MOST_ROWS = 8
"""The most hypotheses of one sentence, or texts, that are decoded by one compiled step."""
MOST_OF_MANY = 512
"""The most hypotheses of many sentences in one compiled step."""
PRODUCT, NORM, ATTEND, GATE, CUT = 0, 1, 2, 3, 4
"""The kinds of stages."""
FULL, HALVES, PAIRS = 0, 1, 2
"""How a matrix is kept: in float32, in bfloat16, or in pairs of bfloat16 numbers that are multiplied as such."""
NOTHING, RELU, GELU, GELU_TANH = 0, 1, 2, 3
"""The activations that may follow a product."""
TILE_ROWS = 16
"""The rows of a tile; fewer than these are not multiplied as tiles."""
TILE_DEPTH = 32
"""The bfloat16 numbers in a row of a tile."""
HELD = ("keys", "values", "owners", "places", "placed", "owner_stride", "group_stride", "key_stride")
"""Where the keys and values of an attention stand. They change from step to step."""

STAGE = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("kind", "source", "source_stride", "target", "target_stride"),
            *("inputs", "outputs", "weights", "bias", "plus", "kept", "activation", "is_rms"),
            *("parts", "tiles", "cut"),
            *("groups", "shared", "writes", "width", "length", "lengths", "values_at"),
            *("turned", "cosines", "sines", "between_pairs", "within_pair"),
            *HELD,
        )
    ]
    + [("number", np.float64)],
    align=True,
)
"""One stage. Addresses are in bytes, and 0 where there is nothing; strides are in float32 numbers.

    kind            PRODUCT, NORM, ATTEND, GATE or CUT
    source, target  rows of float32, `source_stride` and `target_stride` apart
    PRODUCT         target = source W + bias + plus (whose rows are as far apart as the target's), with the matrix in
                    panels (inputs, PANEL), `kept` in float32 (FULL) or bfloat16 (HALVES); or (PAIRS) in panels of
                    bfloat16 (inputs / 2, PANEL, 2), where the numbers of the source are rounded too, and the last of
                    those of a number of inputs that is no multiple of TILE_DEPTH have zeros behind them.
                    `activation` is applied to the sum. If there are `parts`, TILE_ROWS rows and more are multiplied as
                    tiles: the rows that the stage before has cut, at `cut`, with the matrix at `tiles`
    CUT             `inputs` numbers of each row of the source are cut into `parts`, and written to the target as tiles
                    (see `regard.compiled.tile_code`). It does nothing for fewer than TILE_ROWS rows, or without parts
    NORM            the layer norm of `inputs` numbers, or if `is_rms` their root mean square norm, with the weight
                    `weights`, the bias `bias` and the epsilon `number`
    GATE            `outputs` numbers: the SiLU of the source's first ones times its next ones
    ATTEND          for each of `groups` key heads: `shared` queries of `width` numbers each attend to `length` keys
                    and values. These belong to owners: the numbers of the rows' owners stand at `owners`, int64, or
                    each row is its own, where it is 0. Those of the next owner stand `owner_stride` further on, of the
                    next group `group_stride`, of the next key `key_stride`. The first `placed` keys of a row belong to
                    others: `places` is the address of the numbers of their owners, `placed` for each row, int64. An
                    owner may have another number of keys: `lengths` is the address of these numbers, int64, or 0.
                    Scores are multiplied with `number`. If `writes`, the source's keys stand after its queries, its
                    values at `values_at`, and both are first written as the owner's last key and value. If `turned`,
                    so many numbers of each query and of the new key are turned first, by the angles whose cosines and
                    sines are given: pair n is at n * `between_pairs`, and its second number `within_pair` further on.
"""

WORK = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("counter", "done", "finished", "rows", "count", "stages", "steps"),
            *("choice", "tokens", "gains", "end", "x", "width", "table", "positions"),
        )
    ],
    align=True,
)
"""One call: a step of some rows, or if there is a `choice` several steps of one text, token after token.

    counter         the address of the next share of the work that no thread has taken
    done            the address of a counter of shares that are done
    finished        the address of a number that is no longer 0 when the text has ended
    rows            how many rows a step has
    count, stages   the number of its stages, and their address
    steps           how many steps are done, if the text does not end before
    choice          the address of a record of `choice_work`, for one number of one row of logits; 0 for one step
    tokens, gains   the addresses of a token and a log-probability a step, int64 and float32, which are written
    end             the token that ends the text
    x, width        the address of the numbers that the first stage reads, and how many these are
    table           the address of the tokens' vectors, `width` numbers for each
    positions       the address of what is added to the vectors of the first step, then of the next ones
"""
