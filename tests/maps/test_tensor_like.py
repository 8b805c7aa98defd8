"""A map passes for the tensor that it stands for: idioms on the map and on the dense tensor give equal answers."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.errors import ArgumentError, TooLargeError
from tests.maps.dense_maps import bins, distances
from tests.maps.test_idioms import LAZY, idioms, made, said

DOUBLE = torch.float64


def some(seed: int = 0, *, grad: bool = False) -> regard.AttentionMap:
    torch.manual_seed(seed)
    q, k = (torch.randn(2, 3, n, 4, dtype=DOUBLE, requires_grad=grad) for n in (5, 7))
    return regard.attention(q, k, k, mask=regard.causal(), return_weights=True).weights


torch.manual_seed(9)
V = torch.randn(2, 3, 7, 6, dtype=DOUBLE)


def signed(one: Any) -> Any:
    factors = torch.tensor([1.0, -4.0, 2.0], dtype=DOUBLE)
    if isinstance(one, regard.AttentionMap):
        return one.average(1, weights=factors)
    return (one * (factors / factors.sum())[:, None, None]).sum(1)


def as_tensor(answer: Any) -> Tensor:
    return answer.dense() if isinstance(answer, regard.AttentionMap) else answer


def same(ours: Any, theirs: Tensor) -> None:
    ours = as_tensor(ours)
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    tolerance = {torch.float16: 1e-3, torch.float32: 1e-6}.get(theirs.dtype, 1e-11)
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", [one for one in idioms(LAZY) if not one.startswith(("q.", "x.to"))])
def test_statistics_and_gradients_of_what_stays_lazy(name: str) -> None:
    """A map that was made from maps answers like its own matrix, and carries gradients."""
    names = {**made((2, 3, 5, 7), "causal", regard.Softmax(), 0), "x": some(0, grad=True), "y": some(1)}
    a = names["x"]
    found, expected = said(name, names), said(name, {**names, "x": a.dense(), "y": names["y"].dense()})
    if not isinstance(found, regard.AttentionMap):
        return
    same(found.received(), expected.sum(-2))
    same(found.top_keys(1).values[..., 0], expected.amax(-1))
    same(found.pooled(2, 3, "sum"), bins(expected, 2, 3, Tensor.sum))
    if "[" not in name:  # a part is at the places of its whole
        same(found.distance(), (expected * distances(*expected.shape[-2:])).sum(-1))
    if not found.requires_grad or not expected.requires_grad:
        return
    inputs = [t for t in a.source.tensors() if t.requires_grad][:2]
    ours, theirs = (torch.autograd.grad((x**2).sum(), inputs, retain_graph=True) for x in (found.dense(), expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_the_indices_of_topk_are_keys_each_once() -> None:
    """Causal rows have fewer weights than are asked for; masked keys fill them up, as in the tensor."""
    a = some()
    for k in range(1, 8):
        values, indices = torch.topk(a, k)  # type: ignore[arg-type]
        assert all(len(set(row)) == k for row in indices.flatten(0, -2).tolist())
        same(a.dense().gather(-1, indices), values)
        same(values, a.dense().topk(k).values)
    assert (a.top_keys(7).indices == -1).any()
    values, indices = signed(a).topk(7)
    same(signed(a).dense().gather(-1, indices), values)


def test_every_name_of_a_tensor_means_what_the_tensors_does() -> None:
    """A method of the map's own that a tensor has too is listed here, because a test compares the two."""
    compared = {
        "detach", "device", "dtype", "mT", "mean", "requires_grad", "shape", "sum", "to",
    }  # fmt: skip
    assert {name for name in dir(regard.AttentionMap) if hasattr(Tensor, name) and name[0] != "_"} == compared


def test_a_map_is_never_changed() -> None:
    a = some()
    with pytest.raises(ArgumentError, match=r"mul_\(\) changes a tensor"):
        a.mul_(2)  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match="never changed"):
        a[0] = 0.0
    with pytest.raises(ArgumentError, match="never changed"):
        F.relu_(a)  # type: ignore[arg-type]


def test_the_limit_holds_for_every_door() -> None:
    x = torch.zeros(1, 1, 20_000, 1)
    large = regard.attention(x, x, x, return_weights=True).weights
    doors: list[Callable[[Any], object]] = [np.asarray, lambda x: x + 1, lambda x: torch.softmax(x, -1)]
    for door in doors:
        with pytest.raises(TooLargeError, match=r"1\.5 GiB"):
            door(large)
    assert math.isclose(float(large.mean()), 1 / 20_000, rel_tol=1e-4)


def test_wrong_arguments_are_told_by_torch() -> None:
    a = some()
    with pytest.raises(IndexError, match="Dimension out of range"):
        a.sum(7)
    with pytest.raises(AttributeError, match="no attribute 'maen'"):
        a.maen(1)  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match=r"to\(\) takes a device or a dtype, got 'nowhere'"):
        a.to("nowhere")
    with pytest.raises(ArgumentError, match=r"torch\.int32"):
        a.to(torch.int32)


SAID: dict[str, Callable[[Any], Any]] = {
    "no dimensions": lambda a: a.sum([]),
    "no dimensions, mean": lambda a: torch.mean(a, dim=[]),
    "a dimension twice": lambda a: a.sum((1, -3)),
    "a dimension twice, largest": lambda a: a.amax((0, 0)),
    "a sum of integers": lambda a: a.sum(dtype=torch.int64),
    "a mean of integers": lambda a: a.mean(dtype=torch.int64),
    "an axis": lambda a: a.argmax(axis=1),
    "bmm of more dimensions": lambda a: torch.bmm(a, torch.ones(7, 2)),
    "complex values": lambda a: a @ torch.ones(7, 2, dtype=torch.complex64),
    "complex values from the left": lambda a: torch.ones(2, 5, dtype=torch.complex64) @ a,
    "zeros": lambda a: a / torch.zeros(7),
    "is in": lambda a: (0.0 in a, 7.0 in a),
    "as an integer": lambda a: int(2.5 * a[0, 0, :1, :1] / a[0, 0, :1, :1]),
    "as an integer, several": int,
    "a set of bits": lambda a: a.bitwise_not(),
}


@pytest.mark.parametrize("asked", SAID.values(), ids=SAID)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
def test_what_torch_says_is_said(dtype: torch.dtype, asked: Callable[[Any], Any]) -> None:
    q, k = (torch.randn(2, 3, n, 4, dtype=dtype) for n in (5, 7))
    one = regard.attention(q, k, k, mask=regard.causal(), return_weights=True).weights
    try:
        expected = asked(one.dense())
    except Exception as error:
        with pytest.raises(type(error), match=re.escape(str(error).splitlines()[0])):
            asked(one)
    else:
        torch.testing.assert_close(as_tensor(asked(one)), expected, equal_nan=True)


def test_arithmetic_gives_what_is_stored() -> None:
    one, array = some(), np.ones((5, 7))
    for found in (one + array, one - array, one * array, 2 * one, one - one, np.float32(0.5) * one):
        assert not isinstance(found, regard.AttentionMap)
        assert torch.as_tensor(found).shape == one.shape


def test_the_dtype_of_answers() -> None:
    a: Any = some().to(torch.bfloat16)
    assert a.dtype == a.dense().dtype == a.received().dtype == a.mean(1).dtype == (a @ V).dtype == torch.bfloat16
    assert a.topk(2).indices.dtype == torch.int64
    # The sums are computed before they are rounded.
    torch.testing.assert_close(a.received(), some().received().to(torch.bfloat16), rtol=0, atol=0)
    assert a.to(DOUBLE).dtype == DOUBLE
    torch.testing.assert_close(a.to(DOUBLE).dense(), some().dense(), rtol=0, atol=0)
