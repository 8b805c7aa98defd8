"""The scores of papers that evict keys or prune tokens, against their eager forms on dense weights."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.errors import ArgumentError, ShapeError
from regard.maps import selection


def prompt(groups: int = 2) -> tuple[regard.AttentionMap, Tensor]:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 40, 8, dtype=torch.float64), torch.randn(2, groups, 40, 8, dtype=torch.float64)
    weights = regard.map_of(q, k, mask=regard.causal())
    return weights, weights.dense()


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_heavy_hitters() -> None:
    weights, dense = prompt()
    close(selection.accumulated(weights), dense.sum(-2).unflatten(1, (2, 2)).mean(2))


def test_the_newest_query() -> None:
    weights, dense = prompt()
    close(selection.last_query(weights), dense[:, :, -1].mean(1))
    one = weights[0, 1]
    assert isinstance(one, regard.AttentionMap)
    close(selection.last_query(one), dense[0, 1, -1])


@pytest.mark.parametrize("pool", [F.avg_pool1d, F.max_pool1d])
@pytest.mark.parametrize("width", [1, 3, 7])
def test_the_observation_window(width: int, pool: selection.Pool) -> None:
    weights, dense = prompt()
    # Li et al.'s own code: the window's rows over the keys before it, then avg_pool1d or max_pool1d.
    rows = dense[..., -8:, :-8].mean(-2).unflatten(1, (2, 2)).mean(2)
    expected = pool(rows, width, 1, width // 2)
    found = selection.observed(weights, window=8, width=width, pool=pool)
    close(found[..., :-8], expected)
    assert bool((found[..., -8:] == torch.inf).all())


def test_a_window_that_is_the_whole_prompt_keeps_all() -> None:
    weights, _ = prompt()
    assert bool((selection.observed(weights, window=40) == torch.inf).all())


def test_tokens_of_an_image() -> None:
    weights, dense = prompt(4)
    close(selection.class_token(weights), dense[:, :, 0].mean(1))
    close(selection.class_token(weights, -1), dense[:, :, -1].mean(1))


@given(layers=st.integers(1, 60), budget=st.integers(1, 500), data=st.data())
def test_a_pyramid_of_budgets(layers: int, budget: int, data: st.DataObject) -> None:
    least = data.draw(st.integers(1, budget))
    found = selection.pyramid(layers, budget, least=least)
    assert len(found) == layers
    assert sum(found) == layers * budget
    assert all(one >= next_ - 1 for one, next_ in pairwise(found))
    assert layers == 1 or abs(found[-1] - least) <= 1


@given(layers=st.integers(2, 60), budget=st.integers(1, 500), keys=st.integers(1, 2000))
def test_a_pyramid_is_that_of_the_authors_but_for_their_rounding(layers: int, budget: int, keys: int) -> None:
    """KVCache-Factory's PyramidKV with beta = 20, whose steps are rounded down, so that it keeps a little more."""
    if keys < budget:
        return
    least = max(1, budget // 20)
    most = 2 * budget - least
    if most >= keys:
        most, least = keys, 2 * budget - keys
    steps = (most - least) // (layers - 1)
    found = selection.pyramid(layers, budget, most=keys)
    assert max(found) <= keys
    assert all(abs(one - (most - n * steps)) <= n + 1 for n, one in enumerate(found))


@given(data=st.data())
def test_what_stays(data: st.DataObject) -> None:
    keys = data.draw(st.integers(1, 30))
    scores = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=keys, max_size=keys)), dtype=torch.float32)
    count = data.draw(st.integers(1, keys))
    first = data.draw(st.integers(0, count))
    recent = data.draw(st.integers(0, count - first))
    found = selection.keep(scores, count, first=first, recent=recent).tolist()
    held = set(range(first)) | set(range(keys - recent, keys))
    others = sorted(set(range(keys)) - held, key=lambda key: (-float(scores[key]), key))
    assert found == sorted(held | set(others[: count - len(held)]))


def test_bad_input() -> None:
    weights, _ = prompt()
    with pytest.raises(ArgumentError, match=r"window in \[1, 40\].*got 41 and 7"):
        selection.observed(weights, window=41)
    with pytest.raises(ArgumentError, match="odd width"):
        selection.observed(weights, width=4)
    with pytest.raises(ArgumentError, match="least 9, budget 5"):
        selection.pyramid(3, 5, least=9)
    with pytest.raises(ArgumentError, match=r"first \+ recent <= count <= 4"):
        selection.keep(torch.zeros(4), 5)
    with pytest.raises(ArgumentError, match=r"got 2 \+ 2 and 3"):
        selection.keep(torch.zeros(4), 3, first=2, recent=2)
    with pytest.raises(ShapeError, match=r"\(0,\)"):
        selection.keep(torch.zeros(0), 1)
