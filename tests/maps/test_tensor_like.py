"""A map passes for the tensor that it stands for: idioms on the map and on the dense tensor give equal answers."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.errors import ArgumentError, NotKeptError, TooLargeError
from regard.maps.strictness import strict_maps
from tests.maps.dense_maps import bins, distances

Idiom = Callable[[Any, Any], Any]
DOUBLE = torch.float64


def some(seed: int = 0, *, grad: bool = False) -> regard.AttentionMap:
    torch.manual_seed(seed)
    q, k = (torch.randn(2, 3, n, 4, dtype=DOUBLE, requires_grad=grad) for n in (5, 7))
    return regard.attention(q, k, k, mask=regard.causal(), return_weights=True).weights


torch.manual_seed(9)
V = torch.randn(2, 3, 7, 6, dtype=DOUBLE)
KEYS = torch.rand(2, 1, 1, 7, dtype=DOUBLE)
HEADS = torch.rand(3, 1, 1, dtype=DOUBLE) - 0.5
PAIRS = torch.rand(5, 7) > 0.5
POSITIONS = torch.arange(7.0, dtype=DOUBLE)

LAZY: dict[str, Idiom] = {
    "stack": lambda a, b: torch.stack([a, b]),
    "stack, dim 1": lambda a, b: torch.stack((a, b), 1),
    "stack, dim 2": lambda a, b: torch.stack((a, b), dim=2),
    "cat": lambda a, b: torch.cat([a, b]),
    "cat of heads": lambda a, b: torch.cat([a, b[:, :1]], dim=1),
    "cat of queries": lambda a, b: torch.cat([a, b], dim=-2),
    "a mean over layers": lambda a, b: torch.stack([a, b]).mean(0),
    "a sum over layers and heads": lambda a, b: torch.stack([a, b], 1).sum((1, 2)),
    "mean over heads": lambda a, b: a.mean(1),
    "mean over heads, kept": lambda a, b: a.mean(1, keepdim=True),
    "torch.mean": lambda a, b: torch.mean(a, dim=(0, 1)),
    "sum over queries": lambda a, b: a.sum(2),
    "sum over keys": lambda a, b: a.sum(dim=-1),
    "sum over sequences": lambda a, b: a.sum(0),
    "sum over heads and queries, kept": lambda a, b: a.sum((1, 2), keepdim=True),
    "mean over heads and queries": lambda a, b: a.mean((1, 2)),
    "mean of all": lambda a, b: a.mean(),
    "sum of all": lambda a, b: torch.sum(a),
    "a mask of keys": lambda a, b: a * KEYS,
    "a mask of keys, from the left": lambda a, b: KEYS * a,
    "a mask of pairs": lambda a, b: a * PAIRS,
    "a factor for each head": lambda a, b: torch.mul(a, HEADS),
    "a number": lambda a, b: 2 * a,
    "a quotient": lambda a, b: a / 3,
    "quotients": lambda a, b: a / (KEYS + 1),
    "minus": lambda a, b: -a,
    "a + b": lambda a, b: a + b,
    "a - b": lambda a, b: a - b,
    "a - 2 b": lambda a, b: torch.sub(a, b, alpha=2),
    "sum of a list": lambda a, b: sum([a, b]) / 2,
    "factors, then a sum over queries": lambda a, b: (a * HEADS).sum(-2),
    "factors of keys, then values": lambda a, b: (a * KEYS) @ V,
    "a sum, then values": lambda a, b: (a + b) @ V,
    "matmul": lambda a, b: torch.matmul(a, V),
    "bmm": lambda a, b: torch.bmm(a[0], V[0]),
    "from the left": lambda a, b: torch.ones(2, 5, dtype=DOUBLE) @ a,
    "a vector": lambda a, b: torch.matmul(a, POSITIONS),
    "einsum": lambda a, b: torch.einsum("bhts,bhsd->bhtd", a, V),
    "einsum, heads summed": lambda a, b: torch.einsum("bhts,bhsd->btd", a, V),
    "einsum, operands turned": lambda a, b: torch.einsum("bsd,bhts->bthd", V[:, 0], a),
    "einsum with a vector": lambda a, b: torch.einsum("bhij,j->bhi", a, POSITIONS),
    "einsum over queries": lambda a, b: torch.einsum("bhij,bhid->bhjd", a, torch.ones(2, 3, 5, 2, dtype=DOUBLE)),
    "transpose": lambda a, b: a.transpose(-1, -2),
    "made symmetric": lambda a, b: a[..., :5] + a[..., :5].mT,
    "transpose of heads": lambda a, b: a.transpose(0, 1),
    "permute of heads": lambda a, b: a.permute(1, 0, 2, 3),
    "view": lambda a, b: a.view(6, 5, 7),
    "reshape": lambda a, b: torch.reshape(a, (6, 5, 7)),
    "flatten, unflatten": lambda a, b: a.flatten(0, 1).unflatten(0, (3, 2)),
    "unsqueeze": lambda a, b: a.unsqueeze(1).squeeze(1)[:, None] if isinstance(a, Tensor) else a.unsqueeze(1),
    "unbind": lambda a, b: a.unbind(0)[1],
    "chunk": lambda a, b: torch.chunk(a, 3, dim=1)[2],
    "expand": lambda a, b: a.unsqueeze(1).expand(2, 4, 3, 5, 7),
    "cpu, detach, clone": lambda a, b: a.cpu().detach().clone().contiguous(),
    "float": lambda a, b: a.float(),
    "half": lambda a, b: a.to(torch.float16),
    "half, then a sum": lambda a, b: a.half().sum(-2),
    "to another": lambda a, b: a.to(KEYS.float()),
    "iteration": lambda a, b: torch.stack(list(a)),
    "iteration over rows": lambda a, b: torch.stack(list(a[0, 0])),
    "torch.max of all": lambda a, b: torch.max(a),
    "torch.max over keys": lambda a, b: torch.max(a, -1)[0],
    "torch.max over keys, kept": lambda a, b: torch.max(a, 3, keepdim=True).indices,
    "torch.amax": lambda a, b: torch.amax(a, -1),
    "torch.argmax": lambda a, b: torch.argmax(a, -1),
    "max": lambda a, b: a.max(),
    "max over keys": lambda a, b: a.max(dim=-1).values,
    "max over keys, the index": lambda a, b: a.max(3, True)[1],
    "min": lambda a, b: a.min(),
    "min over keys": lambda a, b: a.min(-1).values,
    "amax over queries": lambda a, b: a.amax(-2),
    "amax over heads and queries, kept": lambda a, b: torch.amax(a, (1, 2), keepdim=True),
    "amax over heads and keys": lambda a, b: a.amax(dim=(1, 3)),
    "amax of all, kept": lambda a, b: a.amax((0, 1, 2, 3), True),
    "amin over queries and keys": lambda a, b: torch.amin(a * 2 - a, (-1, -2)),
    "argmax over keys": lambda a, b: a.argmax(-1),
    "argmin over keys": lambda a, b: (-a).argmin(3, keepdim=True),
    "argmax of those below 0": lambda a, b: (-a).argmax(-1),
    "argmax of a row of zeros": lambda a, b: (a * 0).argmax(-1),
    "topk": lambda a, b: a.topk(3)[0],
    "topk of the smallest": lambda a, b: a.topk(2, largest=False).values,
    "topk, gathered": lambda a, b: as_tensor(a).gather(-1, torch.topk(a, 5, dim=-1).indices),
    "topk of those below 0, gathered": lambda a, b: as_tensor(-a).gather(-1, torch.topk(-a, 3).indices),
    "select": lambda a, b: a.select(1, -1),
    "amax over heads": lambda a, b: a.amax(1),
    "amax over sequences": lambda a, b: torch.amax(a, 0),
    "amax over heads and sequences": lambda a, b: torch.amax(a, (0, 1)),
    "amax over heads, kept": lambda a, b: torch.amax(a, dim=1, keepdim=True),
    "amax over heads, then over keys": lambda a, b: a.amax(1).amax(-1),
    "amin over heads": lambda a, b: (a - b).amin(1),
    "a power": lambda a, b: a**2,
    "mse written out": lambda a, b: ((a - b) ** 2).mean(),
    "mse of heads": lambda a, b: torch.square(a.mean(1) - b.mean(1)).sum((-2, -1)),
    "mse of rows": lambda a, b: (a - b).pow(2).sum(-1),
    "mse_loss": lambda a, b: F.mse_loss(a, b),
    "mse_loss, summed": lambda a, b: F.mse_loss(a, b, reduction="sum"),
    "mse_loss, not reduced": lambda a, b: F.mse_loss(a, b, reduction="none").sum(-2),
    "l1_loss": lambda a, b: F.l1_loss(a, b),
    "absolute values": lambda a, b: abs(a - b).amax(-1),
    "einsum with ...": lambda a, b: torch.einsum("...ts,...sd->...td", a, V),
    "einsum with ..., fewer dimensions": lambda a, b: torch.einsum("...ts,sd->...td", a, V[0, 0]),
    "einsum with ..., one for all heads": lambda a, b: torch.einsum("...ts,...sd->...td", a, V[:, :1]),
    "einsum with ... in the middle": lambda a, b: torch.einsum("b...ts,b...sd->bt...d", a, V),
    "einsum with ..., operands turned": lambda a, b: torch.einsum("...sd,...ts->...td", V[0], a),
    "sizes": lambda a, b: torch.tensor([a.size(1), a.dim(), a.numel(), a.shape[2], *a.size(), len(a), a.ndim]),
}
"""What is answered without the matrix."""

DENSE: dict[str, Idiom] = {
    "stack behind": lambda a, b: torch.stack((a, b), dim=-1),
    "cat of keys": lambda a, b: torch.cat([a, b], dim=-1),
    "plus a number": lambda a, b: a + 1,
    "minus from": lambda a, b: 1 - a,
    "into": lambda a, b: 1 / (a + 1),
    "a cube": lambda a, b: a**3,
    "mse_loss beside a tensor": lambda a, b: F.mse_loss(a, as_tensor(b)),
    "einsum of pairs with ...": lambda a, b: torch.einsum("...ij,...ij->...", a, b),
    "a product of two": lambda a, b: a * b,
    "einsum over heads": lambda a, b: torch.einsum("bhij,h->bij", a, POSITIONS[:3]),
    "einsum over pairs": lambda a, b: torch.einsum("bhij,bhij->bh", a, b),
    "permute of queries": lambda a, b: a.permute(0, 2, 1, 3),
    "reshape of rows": lambda a, b: a.reshape(2, -1),
    "flatten of rows": lambda a, b: a.flatten(1, 2),
    "split of keys": lambda a, b: a.split(1, dim=-1)[0],
    "numpy.asarray": lambda a, b: torch.from_numpy(np.asarray(a)),
    "numpy()": lambda a, b: torch.from_numpy(a.numpy()),
    "tolist": lambda a, b: torch.tensor(a.tolist(), dtype=DOUBLE),
    "softmax": lambda a, b: F.softmax(a, -1),
    "kl_div": lambda a, b: F.kl_div(torch.log(a + 1e-9), b, reduction="batchmean"),
    "comparison": lambda a, b: (a > 0.2) & (b <= 0.5),
    "where": lambda a, b: torch.where(a > 0.2, a, 0.0),
    "cumsum": lambda a, b: a.cumsum(-1),
    "diagonal": lambda a, b: torch.diagonal(a, dim1=-2, dim2=-1),
    "masked_fill": lambda a, b: a.masked_fill(PAIRS, 0.0),
    "sort": lambda a, b: a.sort(-1, descending=True)[0],
    "norm": lambda a, b: torch.linalg.norm(a, dim=(-2, -1)),
    "entropy by hand": lambda a, b: -(a * torch.log(a + 1e-12)).sum(-1),
    "interpolate": lambda a, b: F.interpolate(a, (3, 3)),
    "topk over queries": lambda a, b: torch.topk(a, 2, dim=-2)[0],
    "max over sequences": lambda a, b: a.max(0)[0],
    "argmax of all": lambda a, b: a.argmax(),
    "select of a key": lambda a, b: a.select(-1, 2),
    "std": lambda a, b: a.std(-1),
    "median": lambda a, b: a.median(-1).values,
    "cosine_similarity": lambda a, b: F.cosine_similarity(a, b, dim=-1),
}
"""What only the matrix can answer."""


def as_tensor(answer: Any) -> Tensor:
    return answer.dense() if isinstance(answer, regard.AttentionMap) else answer


def same(ours: Any, theirs: Tensor) -> None:
    ours = as_tensor(ours)
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    tolerance = {torch.float16: 1e-3, torch.float32: 1e-6}.get(theirs.dtype, 1e-11)
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("idiom", LAZY.values(), ids=LAZY)
def test_what_stays_lazy(idiom: Idiom) -> None:
    a, b = some(0), some(1)
    expected = idiom(a.dense(), b.dense())
    with strict_maps():
        found = idiom(a, b)
    same(found, expected)


@pytest.mark.parametrize("idiom", DENSE.values(), ids=DENSE)
def test_what_needs_the_matrix(idiom: Idiom) -> None:
    a, b = some(0), some(1)
    same(idiom(a, b), idiom(a.dense(), b.dense()))
    with (
        strict_maps(),
        pytest.raises(TooLargeError, match=rf"dense weights \(2, 3, 5, 7\) of a map, at {__file__}:\d+"),
    ):
        idiom(a, b)


@pytest.mark.parametrize("name", [n for n in LAZY if "sizes" not in n and "arg" not in n and "kept" not in n])
def test_statistics_and_gradients_of_what_stays_lazy(name: str) -> None:
    """A map that was made from maps answers like its own matrix, and carries gradients."""
    a, b = some(0, grad=True), some(1)
    found, expected = LAZY[name](a, b), LAZY[name](a.dense(), b.dense())
    if not isinstance(found, regard.AttentionMap) or expected.dtype != DOUBLE:
        return
    same(found.received(), expected.sum(-2))
    same(found.top_weight(), expected.amax(-1))
    same(found.pooled(2, 3, "sum"), bins(expected, 2, 3, lambda block: block.sum((-2, -1))))
    same(found.distance(), (expected * distances(*expected.shape[-2:])).sum(-1))
    if not found.requires_grad or not expected.requires_grad:
        return
    inputs = [t for t in a.source.tensors() if t.requires_grad][:2]
    ours, theirs = (torch.autograd.grad((x**2).sum(), inputs, retain_graph=True) for x in (found.dense(), expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@given(data=st.data())
def test_random_chains(data: st.DataObject) -> None:
    """Several lazy steps after one another."""
    steps: list[tuple[str, Callable[[Any], Any]]] = [
        ("stack", lambda x: torch.stack([x, x * 2], 0)),
        ("cat", lambda x: torch.cat([x, x], 0)),
        ("mean", lambda x: x.mean(0) if x.ndim > 3 else x),
        ("sum", lambda x: x.sum(x.ndim - 3, keepdim=True) if x.ndim > 2 else x),
        ("scale", lambda x: x * -0.5),
        ("mask", lambda x: x * PAIRS),
        ("transpose", lambda x: x.transpose(0, 1) if x.ndim > 3 else x),
        ("flatten", lambda x: x.flatten(0, x.ndim - 3) if x.ndim > 3 else x),
        ("index", lambda x: x[-1] if x.ndim > 3 else x),
        ("add", lambda x: x + x * 3),
        ("rows", lambda x: x.only(rows=slice(1, 4)) if isinstance(x, regard.AttentionMap) else x[..., 1:4, :]),
    ]
    chosen = data.draw(st.lists(st.sampled_from(steps[:-1]), min_size=1, max_size=5))
    chosen += data.draw(st.lists(st.sampled_from(steps[-1:]), max_size=1))
    a = some(data.draw(st.integers(0, 3)))
    lazy: Any = a
    dense: Any = a.dense()
    with strict_maps():
        for _, step in chosen:
            lazy, dense = step(lazy), step(dense)
        same(lazy.received(), dense.sum(-2))
        same(lazy @ V[0, 0], dense @ V[0, 0])
        same(
            lazy.mT @ torch.ones(dense.shape[-2], 2, dtype=DOUBLE),
            dense.mT @ torch.ones(dense.shape[-2], 2, dtype=DOUBLE),
        )
    same(lazy, dense)


def test_the_indices_of_topk_are_keys_each_once() -> None:
    """Causal rows have fewer weights than are asked for; masked keys fill them up, as in the tensor."""
    a = some()
    for k in range(1, 8):
        values, indices = a.topk(k)
        assert all(len(set(row)) == k for row in indices.flatten(0, -2).tolist())
        same(a.dense().gather(-1, indices), values)
        same(values, a.dense().topk(k).values)
    assert (a.top_keys(7).indices == -1).any()
    values, indices = (-a).topk(7)
    same(-a.dense().gather(-1, indices), values)


def test_every_name_of_a_tensor_means_what_the_tensors_does() -> None:
    """A method of the map's own that a tensor has too is listed here, because a test compares the two."""
    compared = {
        "argmax", "cpu", "cuda", "detach", "device", "dim", "dtype", "is_cuda", "mT", "max", "mean", "min", "ndim",
        "numel", "requires_grad", "shape", "size", "sum", "to", "topk",
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
    "numbers below the smallest inverse": lambda a: a / 1e-40,
    "tensors of them": lambda a: a / torch.full((7,), 1e-40),
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


def test_an_array_beside_a_map_is_no_number() -> None:
    one, array = some(), np.ones((5, 7))
    for found in (one + array, one - array, one * array):
        assert torch.as_tensor(found).shape == one.shape


OTHERS = {
    "float16": torch.full((7,), 0.3, dtype=torch.float16),
    "float32": torch.full((5, 1), 0.3),
    "float64": torch.full((1, 7), 0.3, dtype=DOUBLE),
    "int64": torch.full((7,), 3),
    "bool": torch.ones(5, 7, dtype=torch.bool),
    "one number of float64": torch.tensor(0.3, dtype=DOUBLE),
    "a number": 0.3,
    "an integer": 3,
    "NumPy's float32": np.float32(0.25),
    "NumPy's int64": np.int64(3),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, DOUBLE], ids=str)
def test_arithmetic_has_the_dtype_that_torch_gives_it(dtype: torch.dtype, other: Any) -> None:
    one = some().to(torch.float32).to(dtype)
    exact, divisor = some().dense(), other.double() if isinstance(other, Tensor) else other
    with strict_maps():
        answers = one * other, other * one, one / other
    for found, expected, as_torch in zip(
        answers,
        (exact * divisor, exact * divisor, exact / divisor),
        (one.dense() * other, other * one.dense(), one.dense() / other),
        strict=True,
    ):
        assert found.dtype == found.dense().dtype == as_torch.dtype
        # It is computed before it is rounded.
        torch.testing.assert_close(found.dense(), expected.to(as_torch.dtype))


def test_only_statistics_were_kept() -> None:
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with torch.no_grad(), regard.watch(model, keep=regard.Summarize("received")) as seen:
        model(*[torch.randn(1, 5, 8)] * 3)
    kept = seen.maps[0]
    torch.testing.assert_close(kept.sum(-2), kept.received())
    with pytest.raises(NotKeptError):
        kept.mean(1).entropy()
    with pytest.raises(NotKeptError):
        np.asarray(kept)


def test_the_dtype_of_answers() -> None:
    a = some().to(torch.bfloat16)
    assert a.dtype == a.dense().dtype == a.received().dtype == a.mean(1).dtype == (a @ V).dtype == torch.bfloat16
    assert a.topk(2).indices.dtype == torch.int64
    # The sums are computed before they are rounded.
    torch.testing.assert_close(a.received(), some().received().to(torch.bfloat16), rtol=0, atol=0)
    assert a.to(DOUBLE).dtype == DOUBLE
    torch.testing.assert_close(a.to(DOUBLE).dense(), some().dense(), rtol=0, atol=0)
