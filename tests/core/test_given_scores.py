"""Weights of given scores, masks as tensors, and scores and normalizations by name."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.call.normalizations import Normalization, as_normalization
from regard.call.scores.custom import as_score
from regard.errors import ArgumentError, ShapeError
from tests.maps.dense_maps import NORMALIZATIONS


@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6), (2, 3, 4, 6), (2, 2, 3, 4, 6)])
def test_the_masked_softmax_is_torchs(shape: tuple[int, ...]) -> None:
    scores = torch.randn(shape, dtype=torch.float64)
    keep = torch.rand(shape) < 0.7
    keep[..., 0] = True
    expected = scores.masked_fill(~keep, -torch.inf).softmax(-1)
    given: Any
    for given in (scores, scores.numpy(), scores.tolist()):
        torch.testing.assert_close(
            regard.call.normalizations.masked_softmax(given, keep).double(), expected, atol=1e-6, rtol=1e-6
        )
    torch.testing.assert_close(regard.call.normalizations.masked_softmax(scores), scores.softmax(-1))


def test_a_row_without_keys_is_zero_and_has_a_gradient() -> None:
    scores = torch.zeros(2, 3, requires_grad=True)
    weights = regard.call.normalizations.masked_softmax(
        scores, torch.tensor([[True, True, False], [False, False, False]])
    )
    assert weights.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]
    weights[0, 0].backward()
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad, torch.tensor([[0.25, -0.25, 0.0], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("normalization", NORMALIZATIONS.values(), ids=str)
def test_every_normalization_gives_the_weights_of_the_call(normalization: Normalization) -> None:
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 8)
    mask = regard.causal() & regard.lengths(torch.tensor([6, 5]))
    weights = regard.attention(query, key, key, normalization=normalization, mask=mask, return_weights=True).weights
    given = normalization(query @ key.mT / math.sqrt(8), mask)
    torch.testing.assert_close(given, weights.dense(), atol=1e-5, rtol=1e-4)


def test_a_sink_for_each_head() -> None:
    sink = torch.tensor([0.0, 2.0])
    weights = regard.SoftmaxWithSink(sink)(torch.zeros(1, 2, 1, 3))
    torch.testing.assert_close(weights[0, :, 0, 0], 1 / (3 + sink.exp()))


@pytest.mark.parametrize("scores", [[1.0, 2.0], "ab", [[1], [2, 3]], torch.ones(2, 2, dtype=torch.bool), None, [[1j]]])
def test_scores_that_are_none(scores: Any) -> None:
    with pytest.raises(ShapeError, match="scores must"):
        regard.call.normalizations.masked_softmax(scores)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([1, 2]), r"valid lengths go in as lengths\(\.\.\.\)"),
        (torch.ones(2, 2), "a float tensor goes in as bias="),
        (torch.ones(3, 2, dtype=torch.bool), "(3, 2)"),
    ],
)
def test_masks_that_do_not_fit(mask: Tensor, message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        regard.call.normalizations.masked_softmax(torch.zeros(2, 2), mask)
    assert message.replace("\\", "") in str(caught.value)


def test_a_mask_as_a_tensor() -> None:
    assert torch.equal(regard.causal().to_tensor(3), torch.ones(3, 3, dtype=torch.bool).tril())
    assert torch.equal(regard.causal().to_tensor(2, 3), torch.ones(2, 3, dtype=torch.bool).tril(1))
    lengths = regard.lengths(torch.tensor([1, 3]))
    assert lengths.to_tensor(2, 3, batch=2).sum(-1).tolist() == [[1, 1], [3, 3]]
    assert lengths.to_tensor(2, 3, batch=2, heads=4).shape == (2, 4, 2, 3)
    by_head = regard.predicate(lambda batch, head, query, key: key <= head)
    assert by_head.to_tensor(1, 3, heads=2).sum(-1).tolist() == [[1], [2]]
    with pytest.raises(ShapeError, match="lengths must have shape"):
        lengths.to_tensor(3, batch=5)
    with pytest.raises(ArgumentError, match=r"to_tensor\(queries, keys\) takes numbers"):
        regard.causal().dense(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("softmax", regard.Softmax()), ("softmax with sink", regard.SoftmaxWithSink()),
        ("Sparsemax", regard.Sparsemax()),
        ("entmax15", regard.Entmax15()), ("entmax-15", regard.Entmax15()), (regard.Sigmoid, regard.Sigmoid()),
    ],
)  # fmt: skip
def test_normalizations_by_name(name: Any, made: Normalization) -> None:
    found = as_normalization(name)
    assert (type(found), str(found)) == (type(made), str(made))
    x = torch.randn(4, 3)
    torch.testing.assert_close(
        regard.attention(x, x, x, normalization=name), regard.attention(x, x, x, normalization=made)
    )
    one, other = (regard.map_of(x, x, normalization=which).dense() for which in (name, made))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("dot", regard.Dot()), ("scaled dot", regard.ScaledDot()), ("scaled_dot", regard.ScaledDot()),
        ("cosine", regard.Cosine()), ("gaussian", regard.call.scores.Gaussian()), (regard.Dot, regard.Dot()),
        (regard.ScaledDot, regard.ScaledDot()), ("boxcar", regard.call.scores.Boxcar()),
    ],
)  # fmt: skip
def test_scores_by_name(name: Any, made: Any) -> None:
    x = torch.randn(4, 3)
    torch.testing.assert_close(regard.attention(x, x, x, score=name), regard.attention(x, x, x, score=made))


@pytest.mark.parametrize("score", ["additive", regard.Additive, "bilinear", regard.Bilinear, regard.SoftCapped])
def test_classes_that_need_arguments_say_which(score: Any) -> None:
    with pytest.raises(ArgumentError, match=r"score=\w+ needs arguments: pass \w+\(\w+"):
        as_score(score)


@pytest.mark.parametrize("wrong", ["sofmax", "", 3, None, dict, object(), torch.zeros(1), regard.ScaledDot()])
def test_normalizations_that_are_none(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="normalization="):
        regard.attention(*torch.zeros(3, 2, 2), normalization=wrong)


@pytest.mark.parametrize("wrong", ["dots", "", 3, None, dict, torch.zeros(1)])
def test_scores_that_are_no_score(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"score=.*(is not known; it takes .scaled dot|its name or a function)"):
        regard.attention(*torch.zeros(3, 2, 2), score=wrong)
