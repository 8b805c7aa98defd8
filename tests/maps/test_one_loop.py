"""The loop over rows gives the answers of the tiles, and leaves to the tiles what it cannot answer."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.maps import one_loop
from tests.core.random_calls import DTYPES, Case, cases
from tests.maps.dense_maps import NORMALIZATIONS, TOLERANCE, check
from tests.maps.test_map_statistics import drawn, weights_of

pytest.importorskip("numba", reason="the loop comes with the extra 'fast'")

USUAL = ("received", "entropy", "top_keys", "pooled_mean", "pooled_max")
Answered = list[bool]


@pytest.fixture(scope="module", autouse=True)
def answered() -> Iterator[Answered]:
    """Whether the loop has answered, each time that it was asked; small maps go through it too."""
    found: Answered = []
    real = one_loop.in_one_loop

    def watched(*asked: Any) -> Any:
        answers = real(*asked)
        found.append(answers is not None)
        return answers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_loop, "SMALL", 0)
        patch.setattr("regard.maps.tiles.in_one_loop", watched)
        yield found


@pytest.mark.parametrize("name", ["softmax", "sink"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@given(case=cases(scores=("dot", "scaled", "cosine")), data=st.data())
def test_the_answers_are_exact(
    name: str, dtype: torch.dtype, answered: Answered, case: Case, data: st.DataObject
) -> None:
    answered.clear()
    with torch.no_grad():
        weights, dense = weights_of(case, dtype, NORMALIZATIONS[name])
        check(weights, dense, tolerance=TOLERANCE[dtype], **drawn(data, dense))
    assert any(answered)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "mask", [None, regard.causal(), regard.window(40), regard.lengths(torch.tensor([0, 333]))], ids=str
)
def test_long_rows_in_several_threads(mask: regard.Mask | None, threads: int, answered: Answered) -> None:
    """Rows of several registers and sets, with a rest; blocks that tiles cut; more threads than cells of a tile."""
    q, k = torch.randn(2, 2, 411, 8), torch.randn(2, 1, 333, 8)
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            weights = regard.attention(3 * q, k, k, mask=mask, return_weights=True).weights
            same = regard.attention(3 * q.double(), k.double(), k.double(), mask=mask, return_weights=True).weights
            answered.clear()
            found = weights.summary(*USUAL, "pooled_sum", k=20, rows=100, columns=64)
            assert answered == [True]
            expected = same.summary(*USUAL, "pooled_sum", k=20, rows=100, columns=64)
    finally:
        torch.set_num_threads(1)
    for name, theirs in expected.items():
        pairs = zip(found[name], theirs, strict=True) if name == "top_keys" else [(found[name], theirs)]
        for one, other in pairs:
            torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=1e-5)


def test_equal_weights_are_ranked_by_their_keys() -> None:
    q = torch.zeros(1, 1, 600, 4)
    with torch.no_grad():
        found = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.summary("top_keys", k=5)[
            "top_keys"
        ]
    row = torch.arange(600)[:, None].expand(600, 5)
    expected = torch.where(torch.arange(5) <= row, torch.arange(5), -1)
    assert torch.equal(found.indices[0, 0], expected)


def test_a_tie_at_the_last_place_keeps_the_first_key() -> None:
    k = torch.zeros(1, 1, 700, 1)
    k[..., [3, 650, 651], :] = 2.0
    q = torch.ones(1, 1, 2, 1)
    with torch.no_grad():
        found = regard.attention(q, k, k, return_weights=True).weights.summary("top_keys", "top_weight", k=4)[
            "top_keys"
        ]
    assert found.indices[0, 0, 0].tolist() == [3, 650, 651, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_go_by_tiles(bad: float, answered: Answered) -> None:
    q, k = torch.randn(1, 1, 50, 4), torch.randn(1, 1, 50, 4)
    k[0, 0, 7] = bad
    answered.clear()
    with torch.no_grad():
        found = regard.attention(q, k, k, mask=regard.causal(), return_weights=True).weights.summary(*USUAL)
    assert answered == [False]
    entropy = found["entropy"]
    assert isinstance(entropy, torch.Tensor)
    assert entropy[0, 0, :7].isfinite().all()
    assert entropy[0, 0, 7:].isnan().any()


def test_what_goes_by_tiles(answered: Answered) -> None:
    q = torch.randn(1, 2, 80, 4)

    def asked(*names: str, weights: regard.AttentionMap, **options: Any) -> Answered:
        answered.clear()
        weights.summary(*names, **options)
        return answered.copy()

    weights = regard.attention(q, q, q, return_weights=True).weights
    assert asked(*USUAL, weights=weights) == [True]
    assert asked(*USUAL, "quantile_mass", weights=weights) == [False]
    assert asked("top_keys", "entropy", weights=weights, k=one_loop.MOST_RANKED + 1) == [False]
    assert asked(*USUAL, weights=weights.average()) == [False]
    assert asked(*USUAL, weights=regard.attention(*[q.double()] * 3, return_weights=True).weights) == [False]
    q.requires_grad_()
    weights = regard.attention(q, q, q, return_weights=True).weights
    assert asked(*USUAL, weights=weights) == [False]
    assert asked(*USUAL, weights=weights.detach()) == [True]


def test_small_maps_do_not_load_numba(monkeypatch: pytest.MonkeyPatch, answered: Answered) -> None:
    monkeypatch.setattr(one_loop, "SMALL", 80 * 80 + 1)
    q = torch.randn(1, 1, 80, 4)
    weights = regard.attention(q, q, q, return_weights=True).weights
    answered.clear()
    weights.summary(*USUAL)
    assert answered == [False]


def test_without_the_extra_tiles_answer_and_explain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_loop, "is_installed", lambda: False)
    q = torch.randn(1, 1, 80, 4)
    with torch.no_grad():
        weights = regard.attention(q, q, q, return_weights=True).weights
        torch.testing.assert_close(weights.summary("received", "top_weight")["received"], weights.received())
    said = str(regard.explain(q, q, q))
    assert (
        "statistics of its weights: by tiles; with numba (pip install 'regard[fast]') by one loop over each row" in said
    )
    monkeypatch.setattr(one_loop, "is_installed", lambda: True)
    assert "statistics of its weights: by one loop over each row" in str(regard.explain(q, q, q))
    assert "statistics" not in str(regard.explain(q.double(), q.double(), q.double()))
    assert "statistics" not in str(regard.explain(q, q, q, normalization=regard.Sparsemax()))
