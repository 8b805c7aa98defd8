"""The ground `cards`: random calls and their statistics by the Triton programs, which the interpreter runs, against the
dense weights in float64. It is run by name: TRITON_INTERPRET=1 python -m tests.fuzz --only cards."""

from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.maps.loop import triton_plan
from regard.maps.statistics.tiles import explained
from regard.tensors.triton_use import is_interpreted
from tests.fuzz.core.masks import random_mask
from tests.fuzz.core.parts import Sides
from tests.fuzz.drawing import Drawn
from tests.gpu.checked_statistics import check

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def case(drawn: Drawn) -> None:
    assert is_interpreted(), "set TRITON_INTERPRET=1"
    groups = drawn.number(1, 2)
    heads, dim = groups * drawn.number(1, 2), drawn.of([1, 5, 16, 40])
    batch = 1 if heads > 1 else drawn.number(1, 2)
    sides = Sides((batch,), heads, groups, drawn.number(16, 33), drawn.number(1, 36), dim, dim, True)
    mask = random_mask(drawn, sides) if drawn.chance() else None
    dtype, size = drawn.of(DTYPES), drawn.of([1.0, 0.0, 5.0])
    q, k = (
        (size * drawn.normal(*sides.batch, count, length, dim)).to(dtype)
        for count, length in ((heads, sides.queries), (groups, sides.keys))
    )
    options: dict[str, Any] = {"mask": None if mask is None else mask.mask}
    if drawn.chance(4):
        options["score"] = regard.SoftCapped(regard.ScaledDot(), drawn.of([0.5, 4.0]))
    if drawn.chance(4):
        options["bias"] = regard.ALiBi(heads, offset=drawn.of([None, 3]))
    if drawn.chance(4):
        options["normalization"] = regard.SoftmaxWithSink(drawn.of([0.0, -2.0]))
    tiles = [(rows, columns) for rows in (16, 32) for columns in (16, 32)]
    of_rows, of_columns, parts = drawn.of(tiles), drawn.of(tiles), drawn.number(1, 3)
    made = {
        "row_tile": lambda *asked: triton_plan.KernelTile(*of_rows, 4),
        "column_tile": lambda *asked, **how: triton_plan.KernelTile(*of_columns, 4),
        "parts_of": lambda programs, length: parts,
        "SCRATCH": drawn.of([1 << 26, 4 * sides.keys]),
        "RANK_TILE": triton_plan.KernelTile(64, 32, 4),
    }
    sizes = {"k": drawn.number(1, min(sides.keys, 12)), "rows": drawn.of([1, 3, 12]), "columns": drawn.number(1, 36)}
    sizes |= {"rows": min(sizes["rows"], sides.queries), "columns": min(sizes["columns"], sides.keys)}
    with torch.no_grad(), np.errstate(all="ignore"), pytest.MonkeyPatch.context() as patch:
        for name, value in made.items():
            patch.setattr(triton_plan, name, value)
        triton_plan.plan_of.cache_clear()
        weights = regard.attention(q, k, k, return_weights=True, **options).weights
        if "kernels" not in explained(weights.source)[0]:
            return
        dense = regard.attention(
            *(t.double() for t in (q, k, k)), backend="reference", return_weights=True, **options
        ).weights.dense()
        check(weights, dense, tolerance=1e-6 * (1 + 4 * size**2), **sizes)
