"""The mass under a mask, spans, log-sum-exps, largest logits and means per key head against dense weights."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.call.normalizations import Normalization
from regard.call.shapes import Sizes
from regard.errors import ArgumentError, ShapeError
from tests import each_once
from tests.core.random_calls import Case, cases
from tests.maps import dense_maps

MASKS = {
    "none": None,
    "causal": regard.causal(),
    "causal and lengths, one of 0": regard.causal() & regard.lengths(torch.tensor([0, 20])),
    "window": regard.window(5),
}
NORMALIZATIONS = {name: dense_maps.NORMALIZATIONS[name] for name in ("softmax", "sink", "sigmoid", "sparsemax")}
SIZES = Sizes((2,), 4, 2, 37, 41, True)


def example(mask: Any, normalization: Normalization) -> tuple[regard.AttentionMap, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 37, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 2, 41, 8, dtype=torch.float64, requires_grad=True)
    lazy = regard.attention(q, k, k, mask=mask, normalization=normalization, return_weights=True).weights
    return lazy, lazy.dense(), [q, k]


def same(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    for one, other in zip(
        *(torch.autograd.grad((t**2).sum(), inputs, retain_graph=True) for t in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("normalization", NORMALIZATIONS.values(), ids=NORMALIZATIONS)
@pytest.mark.parametrize(
    ("mask", "kept"),
    each_once(
        MASKS.values(), [regard.lengths(7), regard.lengths(torch.tensor([3, 30])), regard.window(4), ~regard.causal()]
    ),
    ids=str,
)
def test_mass(kept: regard.Mask, mask: Any, normalization: Normalization) -> None:
    weights, dense, inputs = example(mask, normalization)
    allowed = kept.dense(SIZES)
    same(weights.mass(kept), (dense * allowed).sum(-1), inputs)
    same(weights.average().mass(kept), (dense.mean(1) * allowed[:, 0]).sum(-1), inputs)
    same(weights.only(heads=[2, 0]).mass(kept), (dense[:, [2, 0]] * allowed).sum(-1), inputs)


def test_mass_under_a_tensor_of_the_map_s_rank() -> None:
    weights, dense, inputs = example(regard.causal(), regard.Softmax())
    chosen = torch.rand(2, 4, 37, 41) < 0.5
    same(weights.mass(chosen), (dense * chosen).sum(-1), inputs)
    same(weights[1].mass(chosen[1]), (dense[1] * chosen[1]).sum(-1), inputs)


@given(case=cases())
def test_mass_of_any_call(case: Case) -> None:
    with torch.no_grad():
        weights = regard.attention(*case.tensors(), **case.options(), return_weights=True).weights
        dense = weights.dense()
        allowed = regard.window(3).dense(Sizes((), 1, 1, dense.shape[-2], dense.shape[-1], False))[0, 0]
        torch.testing.assert_close(weights.mass(regard.window(3)), (dense * allowed).sum(-1), rtol=0, atol=1e-11)


def test_masks_that_do_not_fit() -> None:
    weights, _, _ = example(None, regard.Softmax())
    with pytest.raises(ShapeError, match="lengths"):
        weights.mass(regard.lengths(torch.tensor([1, 2, 3])))
    with pytest.raises(ArgumentError, match="needs a mask"):
        weights.mass(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("normalization", NORMALIZATIONS.values(), ids=NORMALIZATIONS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_spans(mask: Any, normalization: Normalization) -> None:
    weights, dense, inputs = example(mask, normalization)
    keys, queries = [(0, 3), (2, 9), (9, 10), (30, 41)], torch.tensor([[0, 1], [5, 20], [19, 37]])
    expected = torch.stack(
        [torch.stack([dense[..., a:b, c:d].sum(-1).mean(-1) for c, d in keys], -1) for a, b in queries.tolist()], -2
    )
    same(weights.spans(keys, queries), expected, inputs)
    same(weights.spans(), dense, inputs)
    same(
        weights.average().spans(keys=keys), torch.stack([dense.mean(1)[..., c:d].sum(-1) for c, d in keys], -1), inputs
    )


@settings(max_examples=15)
@given(data=st.data())
def test_random_spans_of_a_map_of_many_tiles(data: st.DataObject) -> None:
    ends = st.lists(st.tuples(st.integers(0, 299), st.integers(1, 60)), min_size=1, max_size=8)
    keys, queries = ([(a, min(300, a + n)) for a, n in data.draw(ends)] for _ in range(2))
    torch.manual_seed(0)
    q = torch.randn(40, 300, 4)
    with torch.no_grad():
        weights = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
        dense = weights.dense().double()
        expected = torch.stack(
            [torch.stack([dense[..., a:b, c:d].sum(-1).mean(-1) for c, d in keys], -1) for a, b in queries], -2
        )
        torch.testing.assert_close(weights.spans(keys, queries).double(), expected, rtol=0, atol=1e-5)


NO_WHOLE_NUMBERS = [[(0.5, 2)], [("1", "2")], ["12"], torch.tensor([[0.0, 2.0]]), torch.tensor([0, 2]), 5]


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([(3, 3)], r"got \(3, 3\) as span 0"),
        ([(0, 1), (5, 42)], r"41 keys.*got \(5, 42\) as span 1"),
        ([(-1, 2)], r"\(-1, 2\)"),
        ([5], "a pair"),
        ([], "at least one span"),
        *((one, "whole numbers|list of pairs") for one in NO_WHOLE_NUMBERS),
    ],
)
def test_spans_that_do_not_fit(spans: Any, said: str) -> None:
    for name in ("keys", "queries"):
        with pytest.raises(ShapeError, match=said if name == "keys" else "."):
            example(None, regard.Softmax())[0].spans(**{name: spans})


@pytest.mark.parametrize("normalization", NORMALIZATIONS.values(), ids=NORMALIZATIONS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_scores(mask: Any, normalization: Normalization) -> None:
    weights, _, (q, k) = example(mask, normalization)
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    scores = scores if mask is None else scores.masked_fill(~mask.dense(SIZES), -torch.inf)
    torch.testing.assert_close(weights.max_logit(), scores.detach().amax(-1), rtol=0, atol=1e-12)
    if isinstance(normalization, regard.Sigmoid | regard.Sparsemax):
        with pytest.raises(ArgumentError, match="softmax"):
            assert weights.lse is None
        return
    expected = scores.logsumexp(-1)
    if normalization != regard.Softmax():
        live = expected > -torch.inf
        expected = torch.where(live, torch.logaddexp(expected, torch.tensor(0.3, dtype=torch.float64)), expected)
        torch.testing.assert_close(weights.lse[live], expected[live], rtol=0, atol=1e-12)
        return
    torch.testing.assert_close(weights.lse, expected, rtol=0, atol=1e-12)


def test_the_mean_per_key_head() -> None:
    weights, dense, inputs = example(regard.causal(), regard.Softmax())
    same(weights.per_key_head().dense(), dense.unflatten(1, (2, 2)).mean(2), inputs)
    same(weights[0].per_key_head().dense(), dense[0].unflatten(0, (2, 2)).mean(1), inputs)
    some = torch.stack([dense[:, 1], dense[:, 2:4].mean(1)], 1)
    same(weights[:, 1:4].per_key_head().dense(), some, inputs)
    own = regard.attention(*[inputs[0]] * 3, return_weights=True).weights
    assert own.per_key_head() is own
    with pytest.raises(ArgumentError, match="one call"):
        weights.average().per_key_head()


def test_a_part_of_maps_of_one_head_is_multiplied() -> None:
    q = torch.randn(2, 1, 5, 4)
    weights, x = regard.attention(q, q, q, return_weights=True).weights, torch.randn(5, 3)
    torch.testing.assert_close(weights[:, 0] @ x, weights.dense()[:, 0] @ x)
    torch.testing.assert_close(weights[0][0] @ x, weights.dense()[0, 0] @ x)
