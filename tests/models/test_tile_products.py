"""Products of many rows by tiles of bfloat16, as compiled steps compute them, against torch's in float64."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("numba", reason="numba is not installed (the extra `fast`)")

from regard.compiled import tile_code
from regard.compiled.step_work import CUT, PAIRS, PRODUCT, RELU, STAGE, TILE_DEPTH, TILE_ROWS
from regard.compiled.tile_code import WHOLE_PARTS
from regard.models import compiled_layers
from regard.models.compiled_tiles import tiles_of
from tests.models.test_compiled_step import run_stages

needs_tiles = pytest.mark.skipif(not tile_code.HAS_TILES, reason="this processor, or this process, multiplies no tiles")


def multiplied(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, plus: Tensor | None = None, activation: int = 0
) -> Tensor:
    """The product of rows with a matrix (out, in), as a stage that cuts and one that multiplies compute it."""
    (rows, inputs), outputs = x.shape, len(weight)
    source, target = torch.full((rows, inputs + 3), torch.nan), torch.full((rows, outputs + 2), -7.0)
    source[:, :inputs] = x
    added = torch.full((rows, outputs + 2), torch.nan)
    panels, kept = compiled_layers._panels(weight), compiled_layers._kept(weight)
    tiles, parts = (panels, 1) if kept == PAIRS else (tiles_of(panels), WHOLE_PARTS)
    blocks = -(-inputs // TILE_DEPTH)
    # What a longer row left here means nothing.
    cut = torch.full((-(-rows // TILE_ROWS) * TILE_ROWS, blocks * parts * TILE_DEPTH), torch.nan, dtype=torch.bfloat16)
    common: dict[str, Any] = {
        "source": source.data_ptr(), "source_stride": inputs + 3, "inputs": inputs, "parts": parts,
    }  # fmt: skip
    product = common | {
        "kind": PRODUCT, "target": target.data_ptr(), "target_stride": outputs + 2, "outputs": outputs,
        "weights": panels.data_ptr(), "kept": kept, "cut": cut.data_ptr(), "tiles": tiles.data_ptr(),
        "activation": activation, "bias": 0 if bias is None else bias.data_ptr(),
    }  # fmt: skip
    if plus is not None:
        added[:, :outputs] = plus
        product["plus"] = added.data_ptr()
    stages = np.zeros(2, STAGE)
    for stage, told in zip(stages, (common | {"kind": CUT, "target": cut.data_ptr()}, product), strict=True):
        for name, value in told.items():
            stage[name] = value
    run_stages(stages, rows, torch.get_num_threads())
    assert (target[:, outputs:] == -7.0).all()
    return target[:, :outputs]


def of_unlike_size(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns) * 2.0 ** torch.randint(-12, 12, (rows, columns))


@needs_tiles
@given(
    rows=st.integers(TILE_ROWS, 100),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 200),
    is_half=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_has_the_error_of_float32(rows: int, inputs: int, outputs: int, is_half: bool, seed: int) -> None:
    """Each number errs by no more than a millionth of the sum of the sizes of what is summed."""
    torch.manual_seed(seed)
    x, weight = of_unlike_size(rows, inputs), of_unlike_size(outputs, inputs)
    if is_half:
        x, weight = x.bfloat16().float(), weight.bfloat16()
    bias, plus = torch.randn(outputs), torch.randn(rows, outputs)
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    assert ((multiplied(x, weight) - exact).abs() <= 1e-6 * size).all()
    found, exact = multiplied(x, weight, bias, plus, RELU), (exact + bias + plus).relu()
    assert ((found - exact).abs() <= 1e-6 * (size + bias.abs() + plus.abs())).all()


@needs_tiles
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(300, 256, 500), (100, 2_000, 64), (70, 31, 70)])
def test_it_errs_no_more_than_torch(rows: int, inputs: int, outputs: int) -> None:
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    exact = x.double() @ weight.double().T
    ours, theirs = ((found - exact).square().mean().sqrt() for found in (multiplied(x, weight), x @ weight.T))
    assert ours < 1.05 * theirs


@needs_tiles
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_in_its_row(bad: float) -> None:
    x, weight = torch.randn(40, 50), torch.rand(70, 50) + 1
    plain = multiplied(x, weight)
    x[7, 30] = bad
    found = multiplied(x, weight)
    assert found[7].isnan().all()
    rest = [row for row in range(40) if row != 7]
    assert torch.equal(found[rest], plain[rest])


@needs_tiles
def test_the_tiles_of_others_are_left_as_they_are() -> None:
    """oneDNN sets shapes of its own for its products of bfloat16."""
    x, weight = torch.randn(300, 200), torch.randn(100, 200)
    half = [t.bfloat16() for t in (x, weight)]
    before = half[0] @ half[1].T
    first = multiplied(x, weight)
    assert torch.equal(half[0] @ half[1].T, before)
    assert torch.equal(multiplied(x, weight), first)


@needs_tiles
def test_a_matrix_is_the_sum_of_its_parts() -> None:
    weight = of_unlike_size(5, 7)
    parts = tiles_of(compiled_layers._panels(weight))
    assert parts.shape[:3] == (1, 1, WHOLE_PARTS)
    pairs = parts[0, 0].double().sum(0)  # (pairs, columns, 2)
    assert torch.equal(pairs.transpose(0, 1).flatten(1)[:5, :7], weight.double())


RUN = """
import torch
from regard.compiled import tile_permission
{refuse}
from regard.compiled import tile_code, vector_code
from regard.models import Transformer, TransformerConfig, inference
from regard.storage.choices import Choices
Choices.fastest = lambda self, kind, ways, x: [*ways][-1]
config = TransformerConfig(dim=24, num_heads=2, feed_forward_dim=31, encoder_layers=1, decoder_layers=1)
model = Transformer(config, source_vocab_size=9, target_vocab_size=70).eval()
ready = inference.prepare(model).of_many()
sources, lengths, tokens = torch.randint(3, 9, (20, 5)), torch.full((20,), 5), torch.full((20,), 4)
with torch.no_grad():
    ours, theirs = (each.step(each.start(sources, lengths), tokens)[0] for each in (ready, model))
torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
print(tile_code.HAS_TILES, vector_code.IS_FOR_HOST)
"""


@pytest.mark.parametrize(
    ("told", "refuse", "said"),
    [
        ({"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}, "", "False False"),
        ({}, "tile_permission.may_use_tiles = lambda: False", "False True"),
    ],
    ids=["another processor", "not allowed"],
)
def test_without_tiles_there_are_vectors(told: dict[str, str], refuse: str, said: str) -> None:
    """Instructions that are not known, or not allowed, would end the process."""
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(refuse=refuse)], env={**os.environ, **told}, capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.returncode) == (said, 0), done.stderr
