"""Calls cut into many small blocks and tiles give what the dense formula gives, forward and backward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import regard
from regard.call.biases import Shaw
from regard.call.biases.relative import diagonal_sums
from regard.call.normalizations import Normalization, Softmax, Softpick
from regard.call.scores.base import ScaledDot
from regard.errors import BackendError
from regard.functional import make_call
from regard.kernels.fused_plan import plan
from tests import each_once
from tests.core.random_calls import SCORES, cases


@contextmanager
def small_blocks() -> Iterator[None]:
    with (
        patch.multiple("regard.kernels.fused_plan", BLOCK_ROWS=(1, 2, 4, 8), CUT_ROWS=2, PAIRS_A_CALL=1),
        patch.multiple("regard.kernels.tiled", TILE_ELEMENTS=40, WIDE_ELEMENTS=100, TILE_ROWS=3),
        patch("regard.call.scores.additive.SWEEP", 12),
    ):
        yield


def gradients(output: Any, weights: Any, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    loss = (output * output.detach().cos()).sum() + weights.dense().square().sum()
    return torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("backend", ["fused", "tiled"])
@settings(max_examples=8)
@given(data=st.data())
def test_small_blocks_give_the_reference(backend: str, kind: str, data: st.DataObject) -> None:
    case = data.draw(cases(scores=(kind,)))
    case = case.to(torch.float64)
    bias = None if case.bias is None else case.bias.requires_grad_(backend == "tiled")
    tensors = [*case.tensors(), *([] if bias is None or not bias.requires_grad else [bias])]
    if is_dataclass(case.score):
        values = [getattr(case.score, field.name) for field in fields(case.score)]
        tensors += [value.requires_grad_() for value in values if isinstance(value, torch.Tensor)]
    options: dict[str, Any] = {"mask": case.mask, "bias": bias, "score": case.score, "return_weights": True}
    expected, its_weights = regard.attention(*case.tensors(), **options, backend="reference")
    theirs = gradients(expected, its_weights, tensors)
    with small_blocks():
        try:
            output, weights = regard.attention(*case.tensors(), **options, backend=backend)
        except BackendError:
            return
        ours = gradients(output, weights, tensors)
        with torch.no_grad():
            unrecorded = regard.attention(*case.tensors(), **options, backend=backend).output
    assert_close(output, expected, rtol=0, atol=1e-10)
    assert_close(unrecorded, expected, rtol=0, atol=1e-10)
    for one, other in zip(ours, theirs, strict=True):
        # Near the edge of a compact kernel a gradient grows as 1 / (1 - u).
        assert_close(one, other, rtol=1e-8, atol=1e-9 * max(1.0, float(other.abs().max()) if other.numel() else 1.0))


RELATIVE = {
    "t5": lambda h: (regard.T5Bias(torch.randn(8, h, dtype=torch.float64).requires_grad_()), "table"),
    "alibi": lambda h: (regard.ALiBi(torch.rand(h, dtype=torch.float64).requires_grad_()), "slopes"),
    "shaw": lambda h: (Shaw(torch.randn(7, 4, dtype=torch.float64).requires_grad_()), "table"),
}


@pytest.mark.parametrize("kind", RELATIVE)
@pytest.mark.parametrize(
    ("normalization", "mask"),
    each_once(
        [regard.Softmax(), regard.Sigmoid(), regard.Entmax15(), Softpick()],
        [None, regard.causal(), regard.window(5)],
    ),
    ids=str,
)
def test_learned_positions_in_small_blocks(kind: str, mask: regard.Mask | None, normalization: Normalization) -> None:
    q, k, v = (torch.randn(2, 4, n, 4, dtype=torch.float64, requires_grad=True) for n in (11, 17, 17))
    bias, name = RELATIVE[kind](4)
    tensors = (q, k, v, getattr(bias, name))
    options: dict[str, Any] = {"mask": mask, "bias": bias, "normalization": normalization, "return_weights": True}
    expected, expected_weights = regard.attention(q, k, v, **options, backend="reference")
    theirs = gradients(expected, expected_weights, tensors)
    with small_blocks():
        found, found_weights = regard.attention(q, k, v, **options, backend="tiled")
        ours = gradients(found, found_weights, tensors)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-10)


def documents_of(*sizes: int) -> regard.Mask:
    return regard.documents(offsets=torch.tensor([0, *sizes]).cumsum(0))


def holes(*places: int) -> torch.Tensor:
    return ~torch.isin(torch.arange(32), torch.tensor(places))[None]


# What a mask becomes: (blocks that are computed, calls of the kernel, calls that need a rendered mask).
CUTS = [
    (regard.window(4), 32, (8, 2, 2)),  # the first block has nothing before it
    (documents_of(8, 8, 8, 8), 32, (4, 1, 0)),  # equal documents go together, without a mask
    (documents_of(8, 8, 8, 8) & regard.causal(), 32, (4, 1, 0)),  # and with the flag
    (documents_of(8, 4, 8, 12), 32, (4, 4, 0)),
    (regard.causal() & regard.lengths(torch.tensor([32])), 32, (1, 1, 1)),
    # Equal blocks that are not alike: some have a hole, and at different places.
    (regard.window(4) & regard.padding(holes(9)), 32, (8, 5, 5)),
    (regard.window(4) & regard.padding(holes(9, 14, 17)), 32, (8, 7, 7)),
    # A document in two blocks: the second does not begin where its keys do.
    (documents_of(4, 28) & regard.causal() & regard.padding(holes(1)), 32, (8, 8, 7)),
]


@pytest.mark.parametrize(("mask", "length", "expected"), CUTS, ids=lambda x: str(x))
def test_a_mask_is_cut_into_blocks_that_need_no_more_than_they_must(
    mask: regard.Mask, length: int, expected: tuple[int, int, int]
) -> None:
    q = torch.randn(1, 2, length, 4)
    options: dict[str, Any] = {"score": ScaledDot(), "normalization": Softmax(), "bias": None, "dropout": 0.0}
    with small_blocks(), patch("regard.kernels.fused_plan.PAIRS_A_CALL", 32):
        blocks = plan(make_call(q, q, q, mask=mask, **options)[0]).blocks
    found = sum(block.count for block in blocks), len(blocks), sum(bool(block.factors) for block in blocks)
    assert found == expected


@pytest.mark.parametrize("mask", [cut[0] for cut in CUTS], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_joined_blocks_are_the_dense_mask(mask: regard.Mask, batch: int) -> None:
    if batch > 1 and not {"lengths", "padding"}.isdisjoint(str(mask).split(" & ")):
        mask = regard.causal() & regard.lengths(torch.tensor([32, 0, 7]))
    q, k, v = (torch.randn(batch, h, 32, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    expected = regard.attention(q, k, v, mask=mask, backend="reference", return_weights=True)
    theirs = gradients(*expected, (q, k, v))
    with small_blocks():
        found = regard.attention(q, k, v, mask=mask, backend="fused", return_weights=True)
        ours = gradients(*found, (q, k, v))
    assert_close(found.output, expected.output, rtol=0, atol=1e-12)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_diagonal_sums_are_those_of_torch() -> None:
    block = torch.randn(2, 3, 5)
    expected = torch.stack([block.diagonal(d, -2, -1).sum(-1) for d in range(-2, 5)], -1)
    assert_close(diagonal_sums(block), expected)
