"""Edits of plain modules against attention that is written out, in bits where nothing changes, and under a watch."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import regard
from regard.edits import AddBias, Edit, Knockout, ReplaceWeights, Reweight, ScaleHeads
from regard.errors import ArgumentError, NonFiniteError, NotSeenError, RegardError, ShapeError
from regard.inspection.capture.module_stack import this_thread
from tests.edits import eager

B, H, G, T, D = 2, 4, 2, 7, 3


class Attend(nn.Module):
    """Grouped heads, with the arguments that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(H * D, (H + 2 * G) * D).double()

    def vectors(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = self.project(x).split([H * D, G * D, G * D], -1)
        return tuple(part.unflatten(-1, (-1, D)).transpose(1, 2) for part in parts)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        q, k, v = self.vectors(x)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **given).transpose(1, 2).flatten(2)

    def expected(self, x: Tensor, edits: list[Edit], mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self.vectors(x)
        return eager.attend(q, k, v, edits, mask=mask, is_causal=is_causal).transpose(1, 2).flatten(2)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attend(), Attend()

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return self.second(self.first(x, **given), **given)


@pytest.fixture
def model() -> Two:
    torch.manual_seed(0)
    return Two()


def x(length: int = T) -> Tensor:
    return 2 * torch.randn(B, length, H * D, generator=torch.Generator().manual_seed(1)).double()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


# -- random edits against the oracle ---------------------------------------------------------------------


def positions(count: int) -> st.SearchStrategy[Any]:
    numbers = st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)
    ends = st.integers(-count - 2, count + 2)
    return st.none() | st.integers(-count, count - 1) | numbers | st.builds(slice, ends, ends)


PLACES: dict[str, Any] = {"heads": positions(H), "queries": positions(T), "batch": positions(B)}
KEYED = {"keys": positions(T), **PLACES}
FACTORS = st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0, 100.0])
PAIRS = st.lists(st.tuples(st.integers(0, T - 1), st.integers(0, T - 1)), min_size=1, max_size=9)


@st.composite
def knockouts(draw: st.DrawFn) -> Knockout:
    places = {name: draw(strategy) for name, strategy in KEYED.items()}
    if places["keys"] is None and places["queries"] is None:
        places["keys"] = 0
    return Knockout(**places)


def dense_weights(seed: int, leading: tuple[int, ...]) -> Tensor:
    return torch.rand(*leading, T, T, generator=torch.Generator().manual_seed(seed)).double().softmax(-1)


EDITS = st.one_of(
    st.builds(Reweight, factor=FACTORS, **KEYED),
    st.builds(AddBias, bias=st.floats(-3, 3), **KEYED),
    knockouts(),
    st.builds(Knockout, edges=PAIRS, heads=positions(H), batch=positions(B)),
    st.builds(ScaleHeads, factor=FACTORS, **PLACES),
    st.builds(
        ReplaceWeights,
        weights=st.builds(dense_weights, st.integers(0, 9), st.sampled_from([(), (H,), (1, H), (B, H)])),
        **PLACES,
    ),
)


def masks(kind: str) -> dict[str, Any]:
    if kind == "causal":
        return {"is_causal": True}
    if kind == "padding":
        return {"attn_mask": torch.tensor([[1] * T, [0, 0] + [1] * (T - 2)]).bool()[:, None, None]}
    if kind == "added":
        numbers = torch.randn(1, H, T, T, generator=torch.Generator().manual_seed(3)).double()
        return {"attn_mask": numbers.masked_fill(torch.ones(T, T).triu(2).bool(), -torch.inf)}
    return {}


@settings(max_examples=120, deadline=None)
@given(st.lists(EDITS, min_size=1, max_size=3), st.sampled_from(["none", "causal", "padding", "added"]))
def test_random_edits_are_those_of_eager_attention(edits: list[Edit], kind: str) -> None:
    torch.manual_seed(0)
    model, given_, vectors = Two(), masks(kind), x()
    expected = model.first.expected(vectors, edits, given_.get("attn_mask"), given_.get("is_causal", False))
    with torch.no_grad(), regard.edit(model, {"first": edits}), regard.watch(model.first, verify=True) as seen:
        output = model.first(vectors, **given_)
    assert torch.isfinite(output).all()
    close(output, expected.detach())
    assert seen.calls[0].error is not None
    assert isinstance(seen.calls[0].error, float) and seen.calls[0].error < 1e-9
