"""A map holds the caller's queries and keys, and copies or fingerprints of the rest: it notices writes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard.errors import GradientError, OverwrittenError
from regard.maps.sources.combined import ScaledSource
from regard.maps.sources.given import given_weights

CALLS: dict[str, dict[str, Any]] = {
    "fused": {"mask": regard.causal()},
    "a bias": {"bias": torch.zeros(5, 7)},
    "tiled": {"backend": "tiled"},
    "soft-capped": {"score": regard.SoftCapped(regard.ScaledDot(), 3.0)},
    "sigmoid": {"normalization": regard.Sigmoid()},
}
READS: dict[str, Callable[[regard.AttentionMap], Any]] = {
    "dense": lambda w: w.dense(),
    "product": lambda w: w @ torch.ones(7, 2),
    "entropy": lambda w: w.entropy(),
    "received, of an average": lambda w: w.average().received(),
    "of the transpose": lambda w: w.mT[0],
    "a copy": copy.deepcopy,
    "detached": lambda w: w.detach(),
}


@pytest.mark.parametrize("times", [1, 3])  # calls that were seen before are put together later
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("which", ["queries", "keys"])
def test_what_was_written_to_is_not_read(which: str, name: str, times: int) -> None:
    with torch.no_grad():
        for _ in range(times):
            q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
            weights = regard.attention(q, k, k, return_weights=True, **CALLS[name]).weights
        some = weights[0]
        expected = some.dense()
        (q if which == "queries" else k).mul_(2)
    for read in READS.values():
        with pytest.raises(OverwrittenError, match=rf"the {which} \(2, 3, .* written to since its call"):
            read(weights)
    assert weights.shape == (2, 3, 5, 7)
    assert "cannot be read: the " in repr(weights)
    # Cells that were chosen before are copies.
    torch.testing.assert_close(some.dense(), expected)


def watched(function: Callable[..., Any], *given: torch.Tensor, **keep: Any) -> regard.AttentionMap:
    class Model(torch.nn.Module):
        def forward(self) -> Any:
            return function(*given)

    with regard.watch(model := Model(), **keep) as seen:
        model()
    return seen[""]


DO = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(1))
Map = regard.AttentionMap
HELD: dict[str, tuple[Callable[..., Map], Callable[..., Map]]] = {
    "queries and keys": (lambda q, k: regard.map_of(q, k), lambda w, q, k: w.average()),
    "a transpose": (lambda q, k: regard.map_of(q, k).mT, lambda w, q, k: w[:, 1]),
    "a log-sum-exp": (
        lambda lse: regard.map_of(DO, DO, lse=lse.copy_((DO @ DO.mT / 2).logsumexp(-1))),
        lambda w, lse: w,
    ),
    "values": (lambda v: regard.map_of(DO, DO).with_values(v), lambda w, v: w.value_norms()),
    "kept values": (
        lambda q, v: regard.attention(q, q, v, return_weights=True, keep_values=True).weights,
        lambda w, q, v: w.attribution(DO),
    ),
    "a gradient of outputs": (lambda do: regard.map_of(DO, DO).with_values(DO), lambda w, do: w.gradient(do)),
    "factors": (lambda f: Map(ScaledSource(regard.map_of(DO, DO).source, f[0, ..., :1])), lambda w, f: w.average()),
    "given weights": (lambda w: Map(given_weights(w)), lambda w, given: w.average()),
    "a recurrence": (
        lambda q, k, decay, beta, a, b: (
            regard.linear_attention(
                q, k, k, decay=decay.abs_().neg_(), beta=beta.abs_()[..., 0], removal=(a, b), return_weights=True
            ).weights
        ),
        lambda w, *given: w.average(),
    ),
    "a watched call": (
        lambda q, k, v: watched(torch.nn.functional.scaled_dot_product_attention, q, k, v, values=True),
        lambda w, q, k, v: w.value_norms(),
    ),
    "watched weights": (lambda q, k: watched(lambda q, k: (q @ k.mT).softmax(-1) @ k, q, k), lambda w, q, k: w.mT),
    "a watched recurrence": (lambda q, k: watched(regard.linear_attention, q, k, k), lambda w, q, k: w[0]),
}


@pytest.mark.parametrize("is_derived_before", [True, False])
@pytest.mark.parametrize("name", HELD)
def test_a_map_answers_for_its_call_or_refuses(name: str, is_derived_before: bool) -> None:
    """A write by others to any tensor that a map holds is noticed: the numbers are those of the call, or none."""
    make, derive = HELD[name]
    count = make.__code__.co_argcount

    def read(place: int | None) -> torch.Tensor:
        draw = torch.Generator().manual_seed(0)
        given = [
            torch.randn((1, 2, 5) if name == "a log-sum-exp" else (1, 2, 5, 4), generator=draw) for _ in range(count)
        ]
        made = make(*given)
        derived = derive(made, *given) if is_derived_before else None
        if place is not None:
            given[place].mul_(1.5)
        return (derive(made, *given) if derived is None else derived).dense()

    right = read(None)
    for place in range(count):
        if name == "a gradient of outputs" and not is_derived_before:
            continue  # It is given anew.
        try:
            found = read(place)
        except OverwrittenError:
            continue
        torch.testing.assert_close(found, right, msg=f"{name}: tensor {place}")


OTHERS: dict[str, Callable[[], tuple[torch.Tensor, dict[str, Any]]]] = {
    "a bias": lambda: (b := torch.randn(5, 7), {"bias": b}),
    "a mask": lambda: (m := torch.rand(5, 7) > 0.5, {"mask": m}),
    "lengths": lambda: (n := torch.tensor([7, 3]), {"mask": regard.lengths(n)}),
    "causal and lengths": lambda: (n := torch.tensor([7, 3]), {"mask": regard.lengths(n) & regard.causal(0)}),
    "offsets": lambda: (o := torch.tensor([0, 2]), {"mask": regard.causal(o)}),
    "a learned score": lambda: (w := torch.randn(4, 4), {"score": regard.Bilinear(w)}),
    "a sink": lambda: (s := torch.randn(3), {"normalization": regard.SoftmaxWithSink(s)}),
}


@torch.no_grad()
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("name", OTHERS)
def test_small_masks_and_biases_that_were_written_to_are_those_of_the_call(name: str, times: int) -> None:
    for _ in range(times):
        written, options = OTHERS[name]()
        q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
        expected = regard.attention(q, k, k, return_weights=True, **options).weights.dense()
        weights = regard.attention(q, k, k, return_weights=True, **options).weights
    written.fill_(1)
    torch.testing.assert_close(weights.dense(), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "change", [lambda b: b.detach().mul_(2), lambda b: b.data.mul_(2)], ids=["counted", "not counted"]
)
@pytest.mark.parametrize("takes_gradient", [True, False])
def test_a_large_or_learned_bias_that_was_written_to_is_not_read(takes_gradient: bool, change: Any) -> None:
    bias = torch.randn(1, 1, 128, 140, requires_grad=takes_gradient)
    q, k = torch.randn(2, 3, 128, 4), torch.randn(2, 3, 140, 4)
    weights = regard.attention(q, k, k, bias=bias, return_weights=True).weights
    change(bias)
    with pytest.raises(
        OverwrittenError, match=r"`bias.tensor` \(1, 1, 128, 140\) has changed since the attention call"
    ):
        weights.dense()
    assert "cannot be read: the " in repr(weights)


def test_a_leaf_that_a_fused_optimizer_stepped_is_not_read() -> None:
    q, k = torch.randn(1, 2, 5, 4, requires_grad=True), torch.randn(1, 2, 7, 4)
    output, weights = regard.attention(q, k, k, return_weights=True)
    output.sum().backward()
    torch.optim.AdamW([q], lr=1.0, fused=True).step()
    with pytest.raises(OverwrittenError, match=r"the queries .* written to since its call"):
        weights.dense()


def test_queries_that_take_a_gradient_after_the_call_have_all_of_it() -> None:
    q, k = torch.randn(1, 2, 5, 4, dtype=torch.float64), torch.randn(1, 2, 7, 4, dtype=torch.float64)
    weights = regard.attention(q, k, k, return_weights=True).weights
    assert not weights.entropy().requires_grad
    q.requires_grad_()
    reads: list[Callable[[Any], torch.Tensor]] = [lambda w: w.entropy(), lambda w: w.dense().square(), lambda w: w @ k]
    for read in reads:
        (found,) = torch.autograd.grad(read(weights).sum(), q, retain_graph=True)
        (right,) = torch.autograd.grad(read(regard.attention(q, k, k, return_weights=True).weights).sum(), q)
        torch.testing.assert_close(found, right)


def test_a_view_made_before_its_base_took_a_gradient_is_refused() -> None:
    q, k = torch.randn(2, 5, 4), torch.randn(2, 7, 4)  # The map holds views of four dimensions.
    weights = regard.attention(q, k, k, return_weights=True).weights
    q.requires_grad_()
    with pytest.raises(GradientError, match=r"the queries .* took no gradient when the call ran, and take one now"):
        weights.dense()
    with torch.no_grad():
        assert weights.dense().shape == (2, 5, 7)


def test_a_given_log_sum_exp_has_a_graph_where_it_is_read_with_one() -> None:
    q, k = torch.randn(1, 2, 5, 4, requires_grad=True), torch.randn(1, 2, 7, 4)
    with torch.no_grad():
        weights = regard.map_of(q, k, lse=(q @ k.mT / 2).logsumexp(-1))
    (found,) = torch.autograd.grad(weights.dense().square().sum(), q)
    (right,) = torch.autograd.grad((q @ k.mT / 2).softmax(-1).square().sum(), q)
    torch.testing.assert_close(found, right)


@torch.no_grad()
def test_a_cache_with_room_for_more_keys_may_be_filled() -> None:
    cache, q = torch.zeros(2, 3, 20, 4), torch.randn(2, 3, 1, 4)
    cache[:, :, :7] = torch.randn(2, 3, 7, 4)
    keys = cache[:, :, :7]
    weights = regard.attention(q, keys, keys, return_weights=True).weights
    expected = weights.dense()
    cache[:, :, 7] = 1.0
    torch.testing.assert_close(weights.dense(), expected)


def test_tensors_of_inference_mode_are_read_until_they_are_written_to() -> None:
    with torch.inference_mode():
        q = torch.randn(2, 3, 5, 4)
        weights = regard.attention(q, q, q, return_weights=True).weights
        read = weights.dense()
    torch.testing.assert_close(weights.dense(), read)
    with torch.inference_mode():
        q.mul_(2)
    with pytest.raises(OverwrittenError, match="the queries"):
        weights.dense()
