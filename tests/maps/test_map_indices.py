"""What may stand between the brackets of a map, against the dense tensor; and maps of no sequence at all."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.errors import ShapeError
from regard.maps.tensor_like import strict_maps

INDICES: dict[str, Any] = {
    "integers of NumPy": (0, 1, np.int64(3), np.int32(-1)),
    "a tensor of one integer": (0, 1, torch.tensor(3)),
    "leading integers of NumPy": np.int64(1),
    "an empty list": (0, 1, []),
    "a list": (0, 1, [0, 2]),
    "an array": (0, 1, np.array([0, 2])),
    "a list of bools": (0, 1, [True, False, True, False, True]),
    "an array of bools": (0, 1, np.array([True, False, True, False, True])),
    "uint8, which torch takes for a mask": (0, 1, torch.tensor([1, 0, 1, 0, 1], dtype=torch.uint8)),
    "a column": (0, 1, slice(None), np.int64(2)),
    "no head": (slice(None), []),
    "no query": (0, 1, slice(3, 3)),
    "new dimensions before the queries": (None, 0, None),
    "a new dimension of queries": (0, ..., None, slice(None)),
    "a new dimension behind": (..., None),
    "True": (0, 1, True),
    "paired tensors that broadcast": (0, slice(None), torch.tensor([[0], [3]]), torch.tensor([1, 2])),
    "heads paired with queries": (0, torch.tensor([2, 0]), torch.tensor([1, 4])),
    "sequences paired with keys": (torch.tensor([1, 0]), slice(None), slice(None), torch.tensor([1, 4])),
    "heads and one key": (slice(None), torch.tensor([2, 0]), slice(None), 3),
    "a mask of pairs": (0, slice(None), torch.eye(5, dtype=torch.bool)),
    "a mask of heads": (torch.tensor([[True, False, True], [False, True, False]]),),
    "a mask of everything": (torch.arange(150).view(2, 3, 5, 5) % 4 == 0,),
    "queries by a matrix": (0, 0, torch.tensor([[1, 2], [0, 3]])),
    "nothing": (),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_an_index_means_what_it_means_for_a_tensor(index: Any) -> None:
    q = torch.randn(2, 3, 5, 4)
    weights = regard.attention(q, q, q, return_weights=True).weights
    found = weights[index]
    dense = found.dense() if isinstance(found, regard.AttentionMap) else found
    same = tuple(i.bool() if isinstance(i, Tensor) and i.dtype == torch.uint8 else i for i in index) if isinstance(
        index, tuple
    ) else index  # fmt: skip
    torch.testing.assert_close(dense, weights.dense()[same])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, 1, 7), r"query index must be in \[-5, 5\), got \[7\]"),
        ((0, 1, 1.0), r"an index tensor has integers or bools, got \(\) torch.float32"),
        ((0, 1, 0, "x"), "a map takes integers, slices, None, ... and index tensors, got 'x'"),
        (("x",), "a map takes integers, slices"),
        ((0, 1, torch.tensor([1, 0], dtype=torch.uint8), [[1]]), "cannot index a map"),
        ((0, 1, torch.tensor([True, False])), "1-D tensor of integers or of 5 bools"),
        ((5,), "cannot index a map"),
        ((..., 7), r"key index must be in \[-5, 5\), got \[7\]"),
        ((0, 0, 0, 0, 0), "at most 4 indices"),
        ((..., 0, ...), "one ellipsis"),
        ((torch.tensor([0, 1]), 0, torch.tensor([0, 1, 2])), "cannot index a map"),
    ],
)
def test_other_indices_are_refused(index: Any, message: str) -> None:
    q = torch.randn(2, 3, 5, 4)
    with pytest.raises(ShapeError, match=message):
        regard.attention(q, q, q, return_weights=True).weights[index]


def test_what_is_read_of_an_index_alone_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of a long map are read one by one, and slices of it stay lazy: neither makes its matrix."""
    x = torch.randn(1, 2, 20_000, 2)
    weights: Any = regard.attention(x, x, x, return_weights=True).weights
    with regard.maps.strict_maps():
        rows = weights[0, :, 1:, :-1]
        assert isinstance(rows, regard.AttentionMap)
        points = weights[0, :, torch.tensor([1, 7]), torch.tensor([0, 19_999])]
        torch.testing.assert_close(points, torch.stack([weights[0, :, 1, 0], weights[0, :, 7, 19_999]], -1))
        torch.testing.assert_close(rows[:, 6, 0], weights[0, :, 7, 0])


CALLS: dict[str, dict[str, Any]] = {
    "fused": {},
    "causal": {"mask": regard.causal()},
    "tiled": {"backend": "tiled"},
    "reference": {"backend": "reference"},
    "sigmoid": {"normalization": regard.Sigmoid()},
    "Gaussian": {"score": regard.call.scores.Gaussian(1.0)},
    "lengths": {"mask": regard.lengths(torch.zeros(0, dtype=torch.long))},
    "documents": {"mask": regard.documents(torch.zeros(0, 5, dtype=torch.long))},
    "offsets": {"mask": regard.causal(torch.zeros(0, dtype=torch.long))},
    "bias": {"mask": regard.causal(), "bias": torch.zeros(5, 5)},
    "dropout": {"dropout": 0.1},
}
QUESTIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "dense": (lambda m, x: m.dense(), (5, 5)),
    "product": (lambda m, x: m @ x, (5, 4)),
    "transposed product": (lambda m, x: m.mT @ x, (5, 4)),
    "received": (lambda m, x: m.received(), (5,)),
    "entropy": (lambda m, x: m.entropy(), (5,)),
    "participation_ratio": (lambda m, x: m.participation_ratio(), (5,)),
    "distance": (lambda m, x: m.distance(), (5,)),
    "top_weight": (lambda m, x: m.top_keys(1).values[..., 0], (5,)),
    "top_key": (lambda m, x: m.top_keys(1).indices[..., 0], (5,)),
    "top_keys": (lambda m, x: m.top_keys(2).values, (5, 2)),
    "top_p_count": (lambda m, x: m.top_p_count(0.5), (5,)),
    "pooled": (lambda m, x: m.pooled(2, 3), (2, 3)),
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("leading", [(0, 2), (0,)])
def test_maps_of_no_sequence_answer_with_shapes(options: dict[str, Any], leading: tuple[int, ...]) -> None:
    q = torch.randn(*leading, 5, 4, requires_grad=True)
    output, weights = regard.attention(q, q, q, return_weights=True, **options)
    assert output.shape == q.shape
    output.sum().backward()
    assert q.grad is not None
    for one in (weights, weights.detach()):  # without gradients the largest of a tile are found in another way
        for name, (ask, tail) in QUESTIONS.items():
            assert ask(one, q.detach()).shape == (*leading, *tail), name


def test_reductions_of_no_sequence_are_those_of_torch() -> None:
    q = torch.randn(0, 2, 5, 4)
    weights = regard.attention(q, q, q, return_weights=True).weights
    with strict_maps():
        for ask in (
            lambda w: w.sum(), lambda w: w.sum(0), lambda w: w.mean((0, 1)),
            lambda w: w.sum((1, 2)),
            lambda w: w.max(-1).values, lambda w: w.mean(1, keepdim=True),
        ):  # fmt: skip
            found: Any = ask(weights)
            expected = ask(torch.zeros(0, 2, 5, 5))
            found = found.dense() if isinstance(found, regard.AttentionMap) else found
            torch.testing.assert_close(found, expected, equal_nan=True)
        with pytest.raises(RuntimeError, match="numel"):
            torch.max(weights)
    assert regard.divergence(weights, weights.detach()).shape == (0, 2, 5)


@pytest.mark.parametrize("backend", ["fused", "tiled", "reference"])
def test_a_bool_mask_may_be_of_no_sequence(backend: str) -> None:
    q, mask = torch.randn(0, 2, 5, 4), torch.ones(0, 1, 5, 5, dtype=torch.bool)
    output, weights = regard.attention(q, q, q, mask=mask, backend=backend, return_weights=True)
    assert output.shape == q.shape
    assert weights.entropy().shape == (0, 2, 5)
