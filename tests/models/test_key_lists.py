"""Lists of keys: what they hold, what a search in all of them finds, and how much it misses in a few."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from regard.errors import ShapeError
from regard.models import key_lists, token_memory
from regard.models.key_lists import KeyLists, listed, nearest_in_lists
from regard.models.token_memory import RememberingOutput, TokenMemory, Vote


def clustered(entries: int, width: int, groups: int, *, spread: float = 0.5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(groups, width, generator=generator)
    which = torch.randint(groups, (entries,), generator=generator)
    return centres[which] + spread * torch.randn(entries, width, generator=generator)


def halves(keys: Tensor) -> Tensor:
    return 0.5 * keys.square().sum(-1)


@given(entries=st.integers(1, 200), width=st.integers(1, 5), equal=st.booleans(), seed=st.integers(0, 99))
def test_each_key_is_in_the_list_of_its_nearest_centre(entries: int, width: int, equal: bool, seed: int) -> None:
    keys = torch.ones(entries, width) if equal else torch.randn(entries, width, generator=torch.manual_seed(seed))
    order, lists = listed(keys, seed=seed)
    assert sorted(order.tolist()) == list(range(entries))
    assert int(lists.sizes.min()) > 0
    assert int(lists.sizes.sum()) == entries
    own = torch.arange(len(lists.sizes)).repeat_interleave(lists.sizes)
    distances = torch.cdist(keys[order].double(), lists.centres.double())
    torch.testing.assert_close(distances.gather(1, own[:, None])[:, 0], distances.amin(1), rtol=1e-4, atol=1e-4)


def test_centres_are_as_good_as_those_of_scikit_learn() -> None:
    """From random keys, after as many rounds: the mean squared distance is not a tenth above its worst of five."""
    keys = clustered(4_000, 8, 60)
    _, lists = listed(keys)
    ours = torch.cdist(keys, lists.centres).amin(1).square().mean()
    settings: dict[str, Any] = {"init": "random", "n_init": 1, "max_iter": key_lists.LLOYD_ROUNDS}
    theirs = [KMeans(len(lists.sizes), random_state=seed, **settings).fit(keys.numpy()).inertia_ for seed in range(5)]
    assert float(ours) < 1.1 * max(theirs) / len(keys)


@pytest.mark.parametrize("held", [1, 500, 1 << 23])
@given(seed=st.integers(0, 99), count=st.integers(1, 12), queries=st.integers(1, 9))
def test_all_lists_together_find_what_scikit_learn_finds(held: int, seed: int, count: int, queries: int) -> None:
    keys, query = clustered(150, 4, 9, seed=seed), clustered(queries, 4, 9, seed=seed)
    order, lists = listed(keys, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_lists, "SCORES_HELD", held)
        found = nearest_in_lists(query, keys[order], halves(keys[order]), lists, count, looked_at=len(lists.sizes))
    distances = query.square().sum(-1, keepdim=True) - 2 * found[0]
    expected, _ = NearestNeighbors(n_neighbors=count).fit(keys.double().numpy()).kneighbors(query.double().numpy())
    torch.testing.assert_close(distances.double(), torch.from_numpy(expected).square(), rtol=1e-3, atol=1e-3)
    there = keys[order][found[1]]
    torch.testing.assert_close((there - query[:, None]).square().sum(-1), distances, rtol=1e-3, atol=1e-3)


def test_a_few_lists_hold_nearly_all_of_the_nearest() -> None:
    keys, query = clustered(40_000, 16, 300), clustered(200, 16, 300)[:50]
    order, lists = listed(keys)
    assert len(lists.sizes) > 9 * key_lists.LOOKED_AT
    memory = [TokenMemory(keys[order], order % 9, order, lists=some) for some in (None, lists)]
    (exact, _), (found, _) = (one.nearest(query, 32) for one in memory)
    assert float((found <= exact[:, -1:] * (1 + 1e-4)).float().mean()) > 0.95
    assert bool((found >= exact * (1 - 1e-4) - 1e-3).all()), "nothing can be nearer than the nearest"


def test_lists_with_too_few_keys_leave_the_rest_without_weight() -> None:
    keys = torch.tensor([[0.0], [1.0], [100.0], [101.0], [102.0]])
    lists = KeyLists(torch.tensor([[0.5], [101.0]]), torch.tensor([2, 3]))
    scores, _ = nearest_in_lists(torch.tensor([[0.2]]), keys, halves(keys), lists, 4, looked_at=1)
    assert scores.isfinite().tolist() == [[True, True, False, False]]
    memory = TokenMemory(keys, torch.tensor([3, 4, 5, 5, 5]), torch.arange(5), lists=lists)
    output = RememberingOutput(torch.nn.Linear(1, 6), memory, Vote(0.5, 1.0, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_memory, "LOOKED_AT", 1)
        p = output(torch.tensor([[0.2]])).exp().detach()
        _, weights = output.voters(torch.tensor([[0.2]]))
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-5)
    assert weights[0, 2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": torch.tensor([2, 2])},
        {"centres": torch.zeros(2, 2)},
        {"centres": torch.zeros(3, 1)},
    ],
)
def test_lists_of_other_keys_are_refused(change: dict[str, Any]) -> None:
    keys = torch.tensor([[0.0], [1.0], [100.0]])
    lists = KeyLists(torch.tensor([[0.5], [101.0]]), torch.tensor([2, 1]))._replace(**change)
    with pytest.raises(ShapeError, match="are not those of keys"):
        TokenMemory(keys, torch.tensor([3, 4, 5]), torch.arange(3), lists=lists)
    if "sizes" in change:
        with pytest.raises(ShapeError, match="expected lists of all keys"):
            nearest_in_lists(torch.zeros(1, 1), keys, halves(keys), lists, 1)


@pytest.mark.parametrize("count", [32, 33, 64, 90])
@pytest.mark.parametrize("queries", [8, 70])
def test_many_are_wanted_of_lists_with_one_key(count: int, queries: int) -> None:
    """What is not there has no weight, however rows are cut into chunks on the way."""
    keys = torch.randn(2_401, 3, generator=torch.Generator().manual_seed(0))
    keys[2_000:] = 50.0
    lists = KeyLists(torch.cat([keys[:2_000], keys[-1:]]), torch.tensor([1] * 2_000 + [401]))
    scores, places = nearest_in_lists(keys[:queries] + 0.1, keys, halves(keys), lists, count)
    assert scores.isfinite().sum(-1).tolist() == [min(count, key_lists.LOOKED_AT)] * queries
    assert int(places.min()) >= 0
    assert int(places.max()) < len(keys)


def test_lists_of_very_unlike_lengths_are_left_aside() -> None:
    keys = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    lists = KeyLists(torch.zeros(2, 3), torch.tensor([399, 1]))  # centres that would lead astray
    memory = [TokenMemory(keys, torch.arange(400), torch.arange(400), lists=some) for some in (None, lists)]
    exact, found = (one.nearest(keys[:9], 5) for one in memory)
    assert torch.equal(found[1], exact[1])


def test_nothing_is_nearest_to_no_query() -> None:
    keys = clustered(100, 3, 4)
    order, lists = listed(keys)
    for some in (None, lists):
        distances, places = TokenMemory(keys[order], order, order, lists=some).nearest(torch.zeros(0, 3), 7)
        assert distances.shape == places.shape == (0, 7)
