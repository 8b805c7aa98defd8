"""Contract 5 for the statistics: nothing T x S, forward and backward; and a gradient that holds no tiles."""

import gc

import pytest
import torch

import regard
from regard.call.scores import Score
from tests import each_once
from tests.largest import Largest

LENGTH = 1536
LIMIT = 1 << 20
"""A kernel's block of 512 queries and a tile of 4 MiB are constant, or linear in S, at any length."""


SMOOTH = {
    "received": lambda w: w.received().square().sum(),
    "entropy": lambda w: w.entropy().sum(),
    "participation_ratio": lambda w: w.participation_ratio().sum(),
    "product": lambda w: (w @ (torch.arange(LENGTH) / LENGTH)).sum(),
    "distance": lambda w: w.distance().sum(),
    "transposed": lambda w: (w.mT @ torch.ones(LENGTH, 2)).square().sum(),
    "pooled": lambda w: w.pooled(16, 16).square().sum(),
    "top_keys": lambda w: w.top_keys(3).values.sum(),
    "average": lambda w: w.average().entropy().sum() + w.average().received().square().sum(),
    "selection": lambda w: w.only(rows=slice(7, None)).received().square().sum(),
}
MASKS = [
    None,
    regard.causal(),
    regard.causal(-3),
    regard.causal() & regard.lengths(torch.tensor([LENGTH - 100])),
    regard.predicate(lambda b, h, q, k: (q - k) % 7 > 0),
    regard.window(40),
]


def call(mask: regard.Mask | None, score: Score | None = None) -> regard.AttentionMap:
    q, k = (torch.randn(1, 2, LENGTH, 4, requires_grad=True) for _ in range(2))
    options = {} if score is None else {"score": score}
    return regard.attention(q, k, k, mask=mask, return_weights=True, **options).weights


@pytest.mark.parametrize(("name", "mask"), each_once(SMOOTH, MASKS), ids=str)
def test_the_largest_tensor_is_far_below_t_times_s(name: str, mask: regard.Mask | None) -> None:
    with Largest() as largest:
        SMOOTH[name](call(mask)).backward()
    assert largest.elements <= LIMIT


def test_statistics_without_a_gradient_and_scores_that_take_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a tile may hold is one number, whatever the length; here it would be as much as T x S.
    monkeypatch.setattr("regard.kernels.tiled.WIDE_ELEMENTS", 1 << 19)
    score = regard.Additive(torch.randn(4))
    weights, additive = call(regard.causal()), call(regard.causal(), score)
    with Largest() as largest, torch.no_grad():
        weights.summary("top_key", "top_p_count", "top_weight", "pooled_max", "top_keys", k=5)
        weights.average().top_keys(1).indices[..., 0]
        additive.summary("entropy", "received", "top_keys")
        regard.maps.stack([additive, weights]).entropy()
    assert largest.elements <= LIMIT
    with Largest() as largest:
        additive.received().square().sum().backward()
    assert largest.elements <= LIMIT


def test_a_mean_of_many_heads_takes_smaller_tiles() -> None:
    q = torch.randn(1, 24, 512, 4)
    weights = regard.attention(q, q, q, return_weights=True).weights
    with Largest() as largest, torch.no_grad():
        weights.average().top_keys(1).indices[..., 0]
        weights.average().pooled(8, 8, "max")
    assert largest.elements <= LIMIT < 24 * 512 * 512 / 4


def test_weights_times_values() -> None:
    q, v = torch.randn(1, 2, LENGTH, 4), torch.randn(1, 2, LENGTH, 5)
    output, weights = regard.attention(q, q, v, mask=regard.causal(), return_weights=True)
    with Largest() as largest:
        weights = weights.with_values(v)
        for one in (weights.value_norms(), weights.gradient(output), weights.attribution(output)):
            one.received(), one.top_keys(3), one.pooled(8, 8, "max"), one @ torch.ones(LENGTH, 1)
    assert largest.elements <= LIMIT


@pytest.mark.parametrize("name", ["entropy", "received", "pooled", "top_keys"])
@pytest.mark.parametrize("score", [None, regard.Additive(torch.randn(4))], ids=["dot", "additive"])
def test_what_a_graph_holds_until_backward_is_linear(name: str, score: regard.Additive | None) -> None:
    """All storages alive between forward and backward, counted."""

    def alive() -> int:
        gc.collect()
        found = {}
        for thing in gc.get_objects():
            # (A batched tensor of vmap, which a failed call's traceback may keep, has no storage of its own.)
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and not torch._C._functorch.is_batchedtensor(thing):
                found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        return sum(found.values())

    before, saved = alive(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        loss = SMOOTH[name](call(regard.causal(), score))
    assert sum(saved) <= 200 * LENGTH + 2 * 64 * 64 * 16
    loss.backward()
    assert alive() - before < LENGTH * LENGTH * 4


def test_the_counter_sees_a_dense_map() -> None:
    with Largest() as largest:
        call(None).dense()
    assert largest.elements >= 2 * LENGTH * LENGTH > LIMIT
