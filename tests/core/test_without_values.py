"""Tensors that have shapes and no values: on the `meta` device, in a `FakeTensorMode`, and in a trace."""

from collections.abc import Callable
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import regard
from regard.call.shapes import _cached_sizes
from tests.maps.test_map_indices import QUESTIONS as OF_A_MAP

Ask = Callable[[Tensor], Tensor]


def tensor(values: list[object], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device)


MASKS: dict[str, Callable[[Tensor], regard.Mask | Tensor]] = {
    "causal": lambda q: regard.causal(),
    "causal, one offset a sequence": lambda q: regard.causal(tensor([0, 1], q)),
    "lengths": lambda q: regard.lengths(tensor([3, 5], q)),
    "padding": lambda q: regard.padding(torch.ones(2, 5, dtype=torch.bool, device=q.device)),
    "documents": lambda q: regard.documents(tensor([0, 0, 0, 1, 1], q)),
    "blocks": lambda q: regard.blocks(torch.ones(3, 3, dtype=torch.bool, device=q.device), 2),
    "window": lambda q: regard.window(2),
    "predicate": lambda q: regard.predicate(lambda batch, head, query, key: (query + key) % 2 == 0),
    "tensor": lambda q: torch.ones(5, 5, dtype=torch.bool, device=q.device),
    "causal & lengths": lambda q: regard.causal() & regard.lengths(tensor([3, 5], q)),
}
CALLS: dict[str, Ask] = {
    "no mask": lambda q: regard.attention(q, q, q),
    **{name: lambda q, m=m: regard.attention(q, q, q, mask=m(q)) for name, m in MASKS.items()},  # type: ignore[misc]
    **{
        f"{name}, tiled": lambda q, m=m: regard.attention(q, q, q, mask=m(q), backend="tiled")  # type: ignore[misc]
        for name, m in MASKS.items()
    },
    "sparsemax": lambda q: regard.attention(q, q, q, mask=regard.causal(), normalization=regard.Sparsemax()),
    "ALiBi": lambda q: regard.attention(q, q, q, mask=regard.causal(), bias=regard.ALiBi(2)),
    "dropout": lambda q: regard.attention(q, q, q, mask=regard.causal(), dropout=0.1),
    "Gaussian": lambda q: regard.attention(q, q, q, score=regard.call.scores.Gaussian(1.0)),
}


def weights(q: Tensor) -> regard.AttentionMap:
    return regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights


def part(q: Tensor, index: Any) -> Tensor:
    found = weights(q)[index]
    assert isinstance(found, Tensor)
    return found


QUESTIONS: dict[str, tuple[Ask, tuple[int, ...]]] = {
    **{name: (lambda q, ask=ask: ask(weights(q), q), (2, 2, *tail)) for name, (ask, tail) in OF_A_MAP.items()},  # type: ignore[misc]
    "row": (lambda q: weights(q)[..., -1, :], (2, 2, 5)),
    "a row by its index": (lambda q: part(q, (1, 0, 2)), (5,)),
    "at": (lambda q: weights(q)[..., torch.tensor([1, 4]), torch.tensor([0, 2])], (2, 2, 2)),
    "points": (lambda q: part(q, (..., torch.tensor([1, 4]), torch.tensor([0, 2]))), (2, 2, 2)),
    "some queries": (lambda q: weights(q).only(rows=[1, 2]).received(), (2, 2, 5)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_have_shapes(call: Ask) -> None:
    q = torch.randn(2, 2, 5, 8, device="meta")
    assert call(q).shape == q.shape
    assert call(q).device.type == "meta"
    with FakeTensorMode():
        assert call(torch.randn(2, 2, 5, 8)).shape == (2, 2, 5, 8)


@pytest.mark.parametrize(("ask", "shape"), QUESTIONS.values(), ids=QUESTIONS)
def test_maps_have_shapes(ask: Ask, shape: tuple[int, ...]) -> None:
    assert ask(torch.randn(2, 2, 5, 4, device="meta")).shape == shape
    with FakeTensorMode():
        assert ask(torch.randn(2, 2, 5, 4)).shape == shape


def test_gradients_have_shapes() -> None:
    q = torch.randn(2, 2, 5, 8, device="meta", requires_grad=True)
    regard.attention(q, q, q, mask=regard.causal() & regard.lengths(tensor([3, 5], q))).sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape


def test_a_watched_module_on_meta_has_maps_with_shapes() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True, device="meta").eval()
    with torch.no_grad(), regard.watch(layer) as seen:
        layer(torch.randn(1, 5, 8, device="meta"))
    assert [tuple(weights.shape) for _, weights in seen.items()] == [(1, 2, 5, 5)]
    assert seen["self_attn"].entropy().shape == (1, 2, 5)


def test_rows_too_long_to_be_sorted_whole_have_shapes() -> None:
    def ask(q: Tensor) -> Tensor:
        return regard.attention(q, q, q, return_weights=True).weights.top_p_count(0.5)

    assert ask(torch.randn(1, 1, 200, 4, device="meta")).shape == (1, 1, 200)
    with FakeTensorMode():
        assert ask(torch.randn(1, 1, 200, 4)).shape == (1, 1, 200)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("return_weights", [True, False])
def test_a_trace_keeps_nothing_that_follows_from_lengths(
    return_weights: bool, learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # in a trace, sizes are tensors

    def attend(x: Tensor, lengths: Tensor) -> Tensor:
        answer: Any = regard.attention(x, x, x, mask=regard.lengths(lengths), return_weights=return_weights)
        return answer.weights.dense() if return_weights else answer

    x, full, few = torch.randn(2, 3, 5, 4), torch.tensor([5, 5]), torch.tensor([2, 0])
    with torch.set_grad_enabled(learns):
        attend(x.requires_grad_(learns), full)
        cached = _cached_sizes.cache_info().currsize
        script = torch.jit.trace(attend, (x, full), check_trace=False)
        assert return_weights or "scaled_dot_product_attention" in str(script.inlined_graph), "no T x S weights"
        for traced in (script, make_fx(attend)(x, full)):
            torch.testing.assert_close(traced(x, few), attend(x, few), rtol=0, atol=1e-6)
    assert _cached_sizes.cache_info().currsize == cached
