"""Every score and kernel against its formula, forward and gradients, on every backend that runs it."""

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.errors import ArgumentError, BackendError, ShapeError


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("name", ["additive", "cosine", "bilinear", "gaussian", "laplacian", "epanechnikov"])
def test_learned_parameters_take_gradients(name: str, backend: str) -> None:
    q, k, v = (torch.randn(1, 2, n, 3, dtype=torch.float64) for n in (3, 4, 4))
    make = {
        "additive": lambda w: regard.Additive(w[:2], query_weight=w[2:8].view(2, 3), key_weight=w[8:14].view(2, 3)),
        "cosine": lambda w: regard.Cosine(w[:2]),
        "bilinear": lambda w: regard.Bilinear(w[:9].view(3, 3)),
        "gaussian": lambda w: regard.call.scores.Gaussian(w[:2].abs() + 1),
        "laplacian": lambda w: regard.call.scores.Laplacian(w[:2].abs() + 1),
        "epanechnikov": lambda w: regard.call.scores.Epanechnikov(w[:2].abs() + 4),
    }[name]
    w = torch.randn(14, dtype=torch.float64, requires_grad=True)

    def read(w: Tensor) -> Any:
        output, weights = regard.attention(q, k, v, score=make(w), backend=backend, return_weights=True)
        return output, weights[..., 1, :]

    assert torch.autograd.gradcheck(read, (w,), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda w: read(w)[0], (w,), fast_mode=True)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_a_score_of_ones_own_takes_gradients_through_what_it_closes_over(backend: str) -> None:
    q, k, v = (torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 4, 4))
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def weighted_distance(query: Tensor, key: Tensor) -> Tensor:
        return -((query[..., :, None, :] - key[..., None, :, :]) ** 2 @ w.exp())

    def read(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
        return regard.attention(q, k, v, score=weighted_distance, mask=regard.causal(), backend=backend)

    assert torch.autograd.gradcheck(read, (q, k, v, w), fast_mode=True)


def test_dropout_on_tiles_is_the_same_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.kernels.tiled.TILE_ELEMENTS", 16)
    q, k, v = (torch.randn(2, 2, n, 2, dtype=torch.float64, requires_grad=True) for n in (4, 5, 5))

    def read(q: Tensor, k: Tensor, v: Tensor) -> Any:
        torch.manual_seed(3)
        return regard.attention(q, k, v, dropout=0.4, backend="tiled")

    assert torch.autograd.gradcheck(read, (q, k, v), fast_mode=True)
    x = torch.randn(1, 1, 200, 4)
    ones = torch.ones(1, 1, 200, 1)
    dropped = regard.attention(x, x, ones, dropout=0.25, backend="tiled")
    assert abs(float(dropped.mean()) - 1) < 0.05
    assert not torch.equal(dropped, regard.attention(x, x, ones, dropout=0.25, backend="tiled"))


@pytest.mark.parametrize("elements", [1, 1 << 20], ids=["a tile for each row", "one tile"])
def test_every_row_of_every_head_and_sequence_drops_its_own_weights(
    monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    """All weights are equal and the values a unit matrix, so that the output shows which weights were kept."""
    monkeypatch.setattr("regard.kernels.tiled.TILE_ELEMENTS", elements)
    monkeypatch.setattr("regard.kernels.tiled.TILE_ROWS", 1)
    x, values = torch.zeros(3, 2, 4, 1), torch.eye(64).expand(3, 2, 64, 64)
    output = regard.attention(x, torch.zeros(3, 2, 64, 1), values, dropout=0.5, backend="tiled")
    kept = (output > 0).flatten(0, 2)
    assert len({tuple(row.tolist()) for row in kept}) == len(kept) == 24


def test_luongs_concat_is_additive_with_one_matrix() -> None:
    q, k, v = torch.randn(5, 3), torch.randn(6, 4), torch.randn(6, 2)
    vector, weight = torch.randn(7), torch.randn(7, 7)
    pairs = torch.cat([q[:, None].expand(5, 6, 3), k[None].expand(5, 6, 4)], -1)
    weights = ((pairs @ weight.T).tanh() @ vector).softmax(-1)
    score = regard.Additive.concat(vector, weight, 3)
    torch.testing.assert_close(regard.attention(q, k, v, score=score), weights @ v)


def test_the_gaussian_kernel_runs_fused_also_far_from_the_origin() -> None:
    q, k, v = 1000 + torch.randn(50, 3), 1000 + torch.randn(60, 3), torch.randn(60, 2)
    output = regard.attention(q, k, v, score=regard.call.scores.Gaussian(0.5), backend="fused")
    exact = regard.attention(
        *(t.double() for t in (q, k, v)), score=regard.call.scores.Gaussian(0.5), backend="reference"
    )
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=1e-4)
    assert (
        regard.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), score=regard.call.scores.Gaussian()).dtype
        == torch.bfloat16
    )


@pytest.mark.parametrize(
    ("score", "error", "message"),
    [
        (
            regard.Bilinear(torch.ones(3, 4)),
            ShapeError,
            r"weight \(3, 4\) needs query and key of these widths, got 4 and",
        ),
        (lambda q, k: q, ShapeError, r"expected \(1, 1, 2, 5\), got \(1, 1, 2, 4\)"),
        (regard.Additive(torch.ones(3)), ShapeError, "needs a query of width 3, got 4"),
    ],
)
def test_a_wrong_score_is_named(score: Any, error: type[regard.RegardError], message: str) -> None:
    with pytest.raises(error, match=message):
        regard.attention(torch.ones(2, 4), torch.ones(5, 4), torch.ones(5, 4), score=score, backend="reference")


def test_parameters_are_refused_where_they_are_given() -> None:
    with pytest.raises(ArgumentError, match="above 0, got -1"):
        regard.SoftCapped(regard.Dot(), cap=-1.0)
    with pytest.raises(ArgumentError, match="a width or a temperature"):
        regard.call.scores.Gaussian("x")  # type: ignore[arg-type]


def test_fused_says_why_it_does_not_run_a_score() -> None:
    x = torch.randn(2, 3, 4)
    with pytest.raises(BackendError, match="soft-capped at 30"):
        regard.attention(x, x, x, score=regard.SoftCapped(regard.ScaledDot(), cap=30.0), backend="fused")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-4, 1.0, 3e4])
def test_the_cosine_of_a_short_or_long_vector_is_a_number(size: float, dtype: torch.dtype) -> None:
    """In half precision the square of 1e-4 is 0, and that of 3e4 is infinite."""
    x = (size * torch.nn.functional.normalize(torch.randn(1, 1, 5, 4), dim=-1)).to(dtype)
    weights = regard.attention(x, x, x, score=regard.Cosine(3.0), return_weights=True).weights.dense()
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    torch.testing.assert_close(weights.double(), (3 * unit @ unit.mT).softmax(-1), rtol=0, atol=3e-2)


@pytest.mark.parametrize(("heads", "queries", "keys"), [(2, 2, 1), (4, 5, 3), (4, 1, 3), (1, 5, 3)])
@pytest.mark.parametrize(("factor", "groups"), [(-1.0, 1), (0.7, None)])
@pytest.mark.parametrize("mask", [None, regard.causal(0)], ids=str)
@pytest.mark.parametrize("is_image", [False, True])
def test_gradients_of_heads_one_number_wide(
    is_image: bool, mask: regard.Mask | None, groups: int | None, heads: int, queries: int, keys: int, factor: float
) -> None:
    """Heads beside one another, of one number each, may be read as an image whose channels come last.

    torch then puts what it computes of them into memory of that kind, which the kernels do not read.
    """

    def beside(heads: int, length: int) -> torch.Tensor:
        made = torch.randn(2, length, heads, 1, dtype=torch.float64).transpose(1, 2).detach()
        return (made.to(memory_format=torch.channels_last) if is_image else made).requires_grad_()

    q, k, v = beside(heads, queries), beside(groups or heads, keys), beside(groups or heads, keys)
    output, weights = regard.attention(q, k, v, score=regard.ScaledDot(factor), mask=mask, return_weights=True)
    key, value = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = factor * q @ key.mT
    if mask is not None:
        scores = scores.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(), -torch.inf)
    dense = scores.softmax(-1)
    for got, wanted in ((output, dense @ value), (weights.received(), dense.sum(-2)), (weights.dense(), dense)):
        torch.testing.assert_close(got, wanted)
        weigh = torch.randn_like(wanted)
        found, right = (
            torch.autograd.grad((one * weigh).sum(), (q, k), retain_graph=True, allow_unused=True)
            for one in (got, wanted)
        )
        for mine, exact in zip(found, right, strict=True):
            torch.testing.assert_close(mine, exact, atol=1e-12, rtol=1e-9)
