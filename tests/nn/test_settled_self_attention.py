"""Self-attention modules whose calls were seen before, against the long way: the same bits, and the same refusals."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard import settled_calls
from regard.errors import RegardError
from regard.mechanisms.rotary.rotary import Rotary
from regard.mechanisms.scores.base import ScaledDot
from regard.nn import MultiHeadAttention, compat, multi_head

MASKS: dict[str, Any] = {
    "none": lambda batch, length: None,
    "causal": lambda batch, length: regard.causal(),
    "lengths": lambda batch, length: regard.lengths(torch.arange(batch) % (length + 1)),
    "both": lambda batch, length: regard.causal() & regard.lengths(torch.full((batch,), length)),
    "dense": lambda batch, length: torch.ones(length, length, dtype=torch.bool).tril(),
}


def taken(call: Any) -> tuple[Any, bool]:
    """What a call returns, and whether it went the short way."""
    found: list[Any] = []

    def spied(*arguments: Any) -> Any:
        found.append(settled_calls.of_projections(*arguments))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        for module in (multi_head, compat):
            patch.setattr(module, "of_projections", spied)
        answer = call()
    return answer, any(one is not None for one in found)


def the_long_way(call: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for module in (multi_head, compat):
            patch.setattr(module, "of_projections", lambda *_: None)
        return call()


@given(
    mask=st.sampled_from(list(MASKS)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    batch=st.integers(1, 3),
    length=st.integers(1, 9),
    bias=st.booleans(),
    scale=st.sampled_from([None, 0.3, 2.0]),
)
@settings(max_examples=40)
def test_bits_are_those_of_the_long_way(
    mask: str, dtype: torch.dtype, heads: tuple[int, int], batch: int, length: int, bias: bool, scale: float | None
) -> None:
    attend = MultiHeadAttention(12, heads[0], num_kv_heads=heads[1], bias=bias, score=ScaledDot(scale)).to(dtype).eval()
    x, hidden = torch.randn(batch, length, 12, dtype=dtype), MASKS[mask](batch, length)
    with torch.no_grad():
        expected = the_long_way(lambda: attend(x, mask=hidden))
        found, is_short = taken(lambda: attend(x, mask=hidden))
        assert torch.equal(found, expected)
        assert is_short == (mask != "dense")
        seen, is_short = taken(lambda: attend(x, mask=hidden, return_weights=True))
        wanted = the_long_way(lambda: attend(x, mask=hidden, return_weights=True))
        assert torch.equal(seen.output, expected)
        assert is_short == (mask != "dense")
        assert torch.equal(seen.weights.dense(), wanted.weights.dense())


@given(
    mask=st.sampled_from(list(MASKS)),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    batch=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    bias=st.booleans(),
    is_turned=st.booleans(),
)
@settings(max_examples=30)
def test_so_are_those_of_attention_to_others(
    mask: str, heads: tuple[int, int], batch: int, sizes: tuple[int, int], bias: bool, is_turned: bool
) -> None:
    """Rotary positions turn nothing there."""
    width = 4 * heads[0]
    rotary = Rotary(4) if is_turned else None
    attend = MultiHeadAttention(width, heads[0], num_kv_heads=heads[1], bias=bias, rotary=rotary).eval()
    x, y = (torch.randn(batch, size, width) for size in sizes)
    hidden = MASKS[mask](batch, sizes[1]) if mask != "dense" else torch.ones(*sizes, dtype=torch.bool)
    with torch.no_grad():
        expected = the_long_way(lambda: attend(x, y, mask=hidden))
        found, is_short = taken(lambda: attend(x, y, mask=hidden))
        assert torch.equal(found, expected)
        assert is_short or mask in ("dense", "causal", "both")
        seen, _ = taken(lambda: attend(x, y, mask=hidden, return_weights=True))
        wanted = the_long_way(lambda: attend(x, y, mask=hidden, return_weights=True))
        assert torch.equal(seen.output, expected)
        assert torch.equal(seen.weights.dense(), wanted.weights.dense())


@pytest.mark.parametrize("need", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_drop_in_has_them_too(need: tuple[bool, bool], is_causal: bool, dtype: torch.dtype) -> None:
    attend, x = compat.MultiheadAttention(12, 3, batch_first=True).to(dtype).eval(), torch.randn(2, 7, 12, dtype=dtype)

    def call() -> tuple[Tensor, Tensor | None]:
        return attend(x, x, x, need_weights=need[0], average_attn_weights=need[1], is_causal=is_causal)

    with torch.no_grad():
        expected = the_long_way(call)
        found, is_short = taken(call)
    assert is_short
    assert torch.equal(found[0], expected[0])
    assert (found[1] is None) == (expected[1] is None)
    if found[1] is not None and expected[1] is not None:
        assert found[1].dtype == expected[1].dtype
        assert torch.equal(found[1], expected[1])


def test_who_goes_the_long_way() -> None:
    attend, x = MultiHeadAttention(12, 3, dropout=0.5).eval(), torch.randn(2, 5, 12)
    with torch.no_grad():
        attend(x)
        assert taken(lambda: attend(x))[1]
        assert not taken(lambda: attend(x, bias=torch.zeros(5, 5)))[1]
        assert not taken(lambda: attend(x, backend="tiled"))[1]
        attend(x, x)
        assert taken(lambda: attend(x, x))[1]
        assert not taken(lambda: attend(x, x, x))[1]
        assert not taken(lambda: attend(x[None]))[1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not taken(lambda: attend(x))[1]
        with regard.checking():
            assert not taken(lambda: attend(x))[1]
        assert not taken(lambda: attend.train()(x))[1]
        turned = MultiHeadAttention(12, 3, rotary=Rotary(4)).eval()
        turned(x)
        assert not taken(lambda: turned(x))[1]
    assert not taken(lambda: attend.eval()(x))[1]


def test_a_weight_of_another_class_has_products_of_its_own() -> None:
    class Own(Tensor):
        pass

    attend, x = MultiHeadAttention(12, 3).eval(), torch.randn(2, 5, 12)
    with torch.no_grad():
        attend(x)
        attend.in_weights[0] = torch.nn.Parameter(attend.in_weights[0].as_subclass(Own))
        assert not taken(lambda: attend(x))[1]


def test_a_watch_sees_every_call_and_changes_no_bit() -> None:
    attend, x = MultiHeadAttention(12, 3).eval(), torch.randn(2, 5, 12)
    with torch.no_grad():
        attend(x)
        plain, is_short = taken(lambda: attend(x))
        assert is_short
        with regard.watch(attend) as watch:
            watched, is_short = taken(lambda: attend(x))
    assert not is_short
    assert len(watch) == 1
    assert torch.equal(watched, plain)


@torch.no_grad()
@pytest.mark.parametrize("other", [torch.randn(2, 5, 11), torch.randn(2, 5, 12).double()])
def test_others_that_do_not_fit_are_refused_in_the_same_words(other: Tensor) -> None:
    attend, x = MultiHeadAttention(12, 3).eval(), torch.randn(2, 4, 12)
    attend(x, torch.randn(2, 5, 12))
    messages = []
    for way in (taken, the_long_way):
        with pytest.raises((RegardError, RuntimeError)) as caught:
            way(lambda: attend(x, other))
        messages.append(str(caught.value).split("\n")[0])
    assert messages[0] == messages[1]


def test_hooks_of_the_output_layer_are_called() -> None:
    attend, x, called = MultiHeadAttention(12, 3).eval(), torch.randn(2, 5, 12), list[int]()
    attend.out.register_forward_hook(lambda *_: called.append(1))
    with torch.no_grad():
        attend(x)
        assert taken(lambda: attend(x))[1]
    assert len(called) == 2


@pytest.mark.parametrize("wrong", [torch.randn(2, 5, 11), torch.randn(2, 5, 12, dtype=torch.float64)])
def test_what_does_not_fit_is_refused_in_the_same_words(wrong: Tensor) -> None:
    for attend in (MultiHeadAttention(12, 3).eval(), compat.MultiheadAttention(12, 3, batch_first=True).eval()):
        call = (
            (lambda a=attend: a(wrong)) if isinstance(attend, MultiHeadAttention) else lambda a=attend: a(*[wrong] * 3)
        )
        with torch.no_grad():
            settled = MultiHeadAttention(wrong.shape[-1], 1, head_dim=4, num_kv_heads=1).to(wrong.dtype).eval()
            settled(wrong)
            attend(*[torch.randn(2, 5, 12)] * (1 if isinstance(attend, MultiHeadAttention) else 3))
            messages = []
            for way in (taken, the_long_way):
                with pytest.raises((RegardError, RuntimeError)) as caught:
                    way(call)
                messages.append(str(caught.value).split("\n")[0])
        assert messages[0] == messages[1]
