"""What attention() refuses, and how: expected, got, what to do."""

from collections.abc import Callable
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor

import regard
from regard.errors import ArgumentError, BackendError, ShapeError
from regard.kernels import BACKENDS

ONES = torch.ones


@pytest.mark.parametrize(
    ("query", "key", "value", "message"),
    [
        (ONES(2, 4), ONES(3, 5), ONES(3, 5), "one width, got 4 and 5"),
        (ONES(2, 4), ONES(3, 4), ONES(2, 4), r"same length, got query \(2, 4\), key \(3, 4\), value \(2, 4\)"),
        (ONES(2, 4), ONES(1, 3, 4), ONES(1, 3, 4), "share one rank"),
        (ONES(4), ONES(4), ONES(4), "share one rank"),
        (ONES(0, 4), ONES(3, 4), ONES(3, 4), r"at least 1, got query \(0, 4\)"),
        (ONES(2, 4), ONES(0, 4), ONES(0, 4), "drop the empty sequences"),
        (ONES(1, 3, 2, 4), ONES(1, 2, 3, 4), ONES(1, 2, 3, 4), "multiple of the key's heads, got 3 and 2"),
        (ONES(1, 2, 2, 4), ONES(1, 2, 3, 4), ONES(1, 1, 3, 4), "same number of heads"),
        (ONES(2, 2, 4), ONES(3, 3, 4), ONES(3, 3, 4), r"batch dimensions .* must be equal or 1"),
        (ONES(2, 4).double(), ONES(3, 4), ONES(3, 4), "one dtype, got query torch.float64"),
        (ONES(2, 4).long(), ONES(3, 4), ONES(3, 4), "query must be of a floating-point dtype, got torch.int64"),
        ([[1.0]], ONES(3, 4), ONES(3, 4), "query must be a torch.Tensor, got list"),
    ],
)
def test_wrong_tensors_are_named(query: Any, key: Tensor, value: Tensor, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        regard.attention(query, key, value)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_dropout_out_of_range(dropout: float) -> None:
    with pytest.raises(ArgumentError, match=r"\[0, 1\), got"):
        regard.attention(ONES(2, 4), ONES(2, 4), ONES(2, 4), dropout=dropout)


def test_a_bias_of_bools_or_of_a_wrong_shape() -> None:
    with pytest.raises(ShapeError, match=r"got torch.bool; a bool tensor goes in as mask="):
        regard.attention(ONES(2, 4), ONES(2, 4), ONES(2, 4), bias=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"bias must have .* got \(3, 2\)"):
        regard.attention(ONES(2, 4), ONES(2, 4), ONES(2, 4), bias=ONES(3, 2))


def test_a_named_backend_never_falls_back() -> None:
    x = torch.randn(2, 3, 4)
    score = regard.Additive(ONES(4))
    bias = torch.zeros(3, 3, requires_grad=True)
    for options, why in (
        ({"dropout": 0.5}, "have no dropout"),
        ({"score": score}, "compute scaled dot products; the score here: additive score with 4 hidden units"),
        ({"bias": bias}, "give no gradient to a bias"),
    ):
        with pytest.raises(BackendError, match=f"'fused' cannot run this call: .*{why}.*backend=None would take"):
            regard.attention(x, x, x, backend="fused", **options)
        assert why in regard.explain(x, x, x, **options).refused["fused"]
    with pytest.raises(ArgumentError, match=r"one of fused, tiled, reference; got 'flash'"):
        regard.attention(x, x, x, backend="flash")


def test_explain_says_what_is_chosen_and_what_it_costs() -> None:
    x = torch.randn(2, 3, 5, 4)
    explanation = regard.explain(x, x, x, mask=regard.causal())
    assert explanation.backend == "fused"
    assert explanation.extra_bytes == 0
    assert explanation.flops == 2 * 2 * 3 * 5 * 5 * 8
    assert regard.explain(x, x, x, backend="reference").extra_bytes == 2 * 3 * 5 * 5 * 4


SCORES = ("scaled dot", "dot", "cosine", "gaussian", "laplacian", "boxcar", "epanechnikov", "triangular")
NORMALIZATIONS = ("softmax", "sparsemax", "entmax15", "sigmoid", "unnormalized", "softpick")


@pytest.mark.parametrize("keys", [1, 3, 20])
@pytest.mark.parametrize("spoiled", ["a query", "a key", "all keys", "a value"])
def test_nan_propagates_to_the_rows_that_see_it(spoiled: str, keys: int) -> None:
    x = torch.randn(1, 1, keys, 4)
    q, k, v = x.clone(), x.clone(), x.clone()
    part = {"a query": q[..., -1, :], "a key": k[..., 0, :], "all keys": k, "a value": v[..., 0, :]}[spoiled]
    part[..., 0] = torch.nan
    calls = [{"score": score} for score in SCORES] + [{"normalization": name} for name in NORMALIZATIONS]
    for call in calls:
        for mask in (None, regard.causal(), regard.window(keys), torch.ones(keys, keys, dtype=torch.bool)):
            for backend in (None, *BACKENDS):
                try:
                    found = regard.attention(q, k, v, mask=mask, backend=backend, return_weights=True, **call)
                except BackendError:
                    continue
                said = f"{call}, {mask}, {backend}"
                assert found.output[..., -1, :].isnan().any(), said
                assert spoiled == "a value" or found.weights[..., -1, :].isnan().any(), said
                assert spoiled != "a query" or not found.output[..., :-1, :].isnan().any(), said


@pytest.mark.parametrize(
    "combine",
    [lambda a, b: a and b, lambda a, b: a or b, lambda a, b: not a, lambda a, b: bool(a)],
    ids=["and", "or", "not", "bool"],
)
def test_a_mask_is_no_truth_value(combine: Callable[[regard.Mask, regard.Mask], object]) -> None:
    with pytest.raises(ArgumentError, match=r"combine masks with &, \| and ~"):
        combine(regard.causal(), regard.lengths(3))


def _nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(5, 8), torch.randn(4, 8)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("grad", [True, False])
def test_nested_and_sparse_tensors_are_refused_with_what_to_do(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself says of them "Internal error", or that something is not implemented."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user meets our modules
    dense = torch.randn(2, 5, 8)
    sparse = {"sparse_coo": dense.to_sparse(), "_mkldnn": dense.to_mkldnn()}
    module, additive = regard.nn.MultiHeadAttention(8, 2), regard.nn.AdditiveAttention(8, 8, 8)
    with torch.set_grad_enabled(grad):
        for layout in (torch.strided, torch.jagged):
            nested = _nested(layout)
            for call in (lambda x: regard.attention(x, x, x), module, lambda x: additive(x, x)):
                for _ in range(2):
                    with pytest.raises(ShapeError, match=r"must not be nested: pad it .*regard\.lengths"):
                        call(nested)
        for layout_name, tensor in sparse.items():
            for refused in (
                lambda x: regard.attention(x, x, x), lambda x: regard.attention(dense, dense, x), module,
                lambda x: regard.attention(dense, dense, dense, bias=x),
            ):  # fmt: skip
                for _ in range(2):
                    with pytest.raises(
                        ShapeError, match=rf"must be dense, got a tensor of layout torch\.{layout_name}"
                    ):
                        refused(tensor)
        mask = torch.ones(5, 5, dtype=torch.bool).to_sparse()
        with pytest.raises(ShapeError, match="mask must be dense"):
            regard.attention(dense, dense, dense, mask=mask)
        with pytest.raises(ShapeError, match="lengths must be dense"):
            regard.attention(dense, dense, dense, mask=regard.lengths(torch.tensor([3, 5]).to_sparse()))
