"""Masks by hand, their renderings against one another, and their errors."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.errors import ShapeError
from tests.core.contracts import every_rendering_asks_the_predicate, part
from tests.core.random_calls import combined
from tests.fuzz.core.parts import Sides


@given(data=st.data())
def test_every_rendering_is_the_same_predicate(data: st.DataObject) -> None:
    mask, allowed = combined(data.draw, Sides((2,), 3, 3, 11, 13, 1, 1, True))
    if not isinstance(mask, regard.Mask):
        return
    every_rendering_asks_the_predicate(mask, allowed, part(data, 11), part(data, 13))


def test_masks_combine_with_bool_tensors_on_either_side() -> None:
    x, keep = torch.randn(2, 3, 5, 4), torch.rand(5, 5) > 0.4
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    for mask, same in (
        (keep & regard.causal(), keep & causal),
        (regard.causal() & keep, keep & causal),
        (keep | regard.causal(), keep | causal),
        (~regard.causal() | keep, keep | ~causal),
    ):
        assert torch.equal(regard.attention(x, x, x, mask=mask), regard.attention(x, x, x, mask=same))
    with pytest.raises(TypeError, match="'Causal' and 'Tensor'"):
        regard.causal() & torch.zeros(5, 5)


def test_drawings_name_the_combination() -> None:
    mask = (regard.causal() | regard.lengths(torch.tensor([1]))) & ~regard.causal(0)
    assert str(mask) == "(causal | lengths) & ~(causal)"


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 3), r"torch.float32; a float tensor goes in as bias="),
        ("causal", r"got str"),
        (torch.ones(3, 2, dtype=torch.bool), r"or be 2-D \(2, 3\); got \(3, 2\)"),
        (torch.ones(2, 2, 3, dtype=torch.bool), r"got \(2, 2, 3\)"),
    ],
)
def test_a_wrong_mask_is_named(mask: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        regard.attention(torch.ones(2, 4), torch.ones(3, 4), torch.ones(3, 4), mask=mask)


def test_wrong_lengths_are_named() -> None:
    x = torch.ones(2, 3, 4)
    with pytest.raises(ShapeError, match=r"lengths must have shape \(2,\), got \(3,\)"):
        regard.attention(x, x, x, mask=regard.lengths(torch.tensor([1, 2, 3])))
    with pytest.raises(ShapeError, match=r"integers, got torch.float32"):
        regard.lengths(torch.tensor([1.0]))
    with pytest.raises(ShapeError, match=r"padding must have shape \(2, 3\), got \(2, 4\)"):
        regard.attention(x, x, x, mask=regard.padding(torch.ones(2, 4, dtype=torch.bool)))
    with pytest.raises(ShapeError, match=r"bool tensor \(True = keep\) or ids with pad_id="):
        regard.padding(torch.ones(2, 4))


def test_a_predicate_that_does_not_answer_with_bools_is_named() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(ShapeError, match="must return a bool tensor"):
        regard.attention(x, x, x, mask=regard.predicate(lambda b, h, q, k: q - k))


@pytest.mark.parametrize(
    ("shape", "meant"),
    [
        ((2, 7), r"regard\.padding\(mask\)"),
        ((2, 5, 7), r"for all heads alike it is mask\[\.\.\., None, :, :\]"),
        ((6, 5, 7), r"it is mask\.unflatten\(0, \(2, 3\)\)"),
        ((3, 5, 7), r"got \(3, 5, 7\)$"),
    ],
)
def test_masks_as_other_libraries_take_them_are_refused_with_what_to_write(shape: tuple[int, ...], meant: str) -> None:
    query, key, mask = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.ones(shape, dtype=torch.bool)
    with pytest.raises(regard.RegardError, match=meant):
        regard.attention(query, key, key, mask=mask)


@pytest.mark.parametrize(("kind", "offset"), [("causal_lower_right", 4), ("causal_upper_left", 0)])
def test_torchs_causal_bias_is_its_variant_and_not_its_memory(kind: str, offset: int) -> None:
    from torch.nn.attention import bias

    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    made = getattr(bias, kind)
    output, weights = regard.attention(q, k, k, mask=made(5, 9), return_weights=True)
    expected = regard.attention(q, k, k, mask=regard.causal(offset), return_weights=True)
    assert torch.equal(output, expected.output)
    assert torch.equal(weights.dense(), expected.weights.dense())
    assert torch.equal(expected.weights.mass(made(5, 9)), expected.weights.mass(regard.causal(offset)))
    with pytest.raises(ShapeError, match=r"for \(T, S\) = \(6, 9\), and the call has \(5, 9\)"):
        regard.attention(q, k, k, mask=made(6, 9))
    with pytest.raises(ShapeError, match="bias= got torch's CausalBias, which is a mask"):
        regard.attention(q, k, k, bias=made(5, 9))


def test_a_plain_subclass_of_tensor_gets_its_weights() -> None:
    class Image(torch.Tensor):
        pass

    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    output, weights = regard.attention(*(x.as_subclass(Image) for x in (q, k, k)), return_weights=True)
    expected = regard.attention(q, k, k, return_weights=True)
    assert type(output) is Image
    assert torch.equal(output.as_subclass(torch.Tensor), expected.output)
    assert torch.equal(weights.dense().as_subclass(torch.Tensor), expected.weights.dense())
    assert [torch.equal(a, b) for a, b in zip(weights.top_keys(2), expected.weights.top_keys(2), strict=True)] == [
        True,
        True,
    ]
