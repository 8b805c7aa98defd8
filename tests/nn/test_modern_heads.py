"""The parts of today's attention layers, alone and in pairs, against a dense formula in float64."""

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.call.masks.basic import causal, lengths
from regard.call.masks.patterns import window
from regard.call.normalizations import Sigmoid
from regard.errors import ArgumentError
from regard.models.config import DecoderOnlyConfig, EncoderOnlyConfig
from regard.models.one_stack import DecoderOnly, EncoderOnly
from regard.nn import AcrossHeads, MultiHeadAttention

DIM, HEADS, GROUPS, WIDTH = 24, 4, 2, 6
PARTS: dict[str, dict[str, Any]] = {
    "grouped heads": {"num_kv_heads": GROUPS},
    "norm of each head": {"qk_norm": nn.RMSNorm},
    "norm across heads": {"qk_norm": AcrossHeads(nn.LayerNorm)},
    "norm of values": {"value_norm": nn.RMSNorm},
    "gate of heads": {"gate": "head"},
    "gate of elements": {"gate": "element"},
    "sink": {"sink": True},
    "window": {"window": 3},
    "window around": {"window": window(5, side="both")},
    "a part is rotated": {"rotary": regard.Rotary(WIDTH, fraction=0.7)},
    "sigmoid": {"normalization": Sigmoid(-1.0)},
    "a cap": {"score": regard.SoftCapped(regard.ScaledDot(), 2.0)},
    "wide heads": {"head_dim": WIDTH},
}
UNFIT = {frozenset({"sink", "sigmoid"})}


def pairs() -> list[tuple[str, ...]]:
    chosen = [(name,) for name in PARTS] + [*combinations(PARTS, 2)]
    fit = [names for names in chosen if frozenset(names) not in UNFIT]
    return [names for names in fit if sum(len(PARTS[name]) for name in names) == len(_settings(names))]


def _settings(names: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for name in names for key, value in PARTS[name].items()}


def made(names: tuple[str, ...]) -> MultiHeadAttention:
    attend = MultiHeadAttention(DIM, HEADS, **_settings(names)).double()
    with torch.no_grad():
        for parameter in attend.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return attend


def formula(attend: MultiHeadAttention, x: Tensor, allowed: Tensor) -> Tensor:
    """The dense layer: loops over heads, and weights (T, S) in full."""
    q, k, v = nn.functional.linear(x, attend.in_weights[0], attend.in_bias).split(attend.sizes, -1)
    outputs = []
    groups = attend.num_heads // attend.num_kv_heads
    width = attend.head_dim
    if isinstance(attend.query_norm, nn.Module) and hasattr(attend.query_norm, "norm"):
        assert isinstance(attend.key_norm, nn.Module)
        q, k = attend.query_norm.norm(q), attend.key_norm.norm(k)
    for head in range(attend.num_heads):
        mine, shared = slice(head * width, head * width + width), (head // groups) * width
        query, key, value = q[..., mine], k[..., shared : shared + width], v[..., shared : shared + width]
        if isinstance(attend.query_norm, nn.RMSNorm) and isinstance(attend.key_norm, nn.RMSNorm):
            query, key = attend.query_norm(query), attend.key_norm(key)
        if attend.value_norm is not None:
            value = attend.value_norm(value)
        if attend.rotary is not None:
            query, key = _turned(query, 4), _turned(key, 4)
        scores = query @ key.mT / width**0.5
        if isinstance(attend.score, regard.SoftCapped):
            scores = 2.0 * torch.tanh(scores / 2.0)
        scores = scores.masked_fill(~allowed, -torch.inf)
        if isinstance(attend.plain_normalization, Sigmoid):
            weights = torch.sigmoid(scores - 1.0)
        else:
            exponentials = scores.exp()
            more = 0.0 if attend.sink is None else attend.sink[head].exp()
            total = exponentials.sum(-1, keepdim=True) + more
            weights = exponentials / total.where(total > 0, 1.0)
        outputs.append(weights @ value)
    together = torch.stack(outputs, dim=-2)
    if attend.gate is not None:
        gates = torch.sigmoid(attend.gate(x))
        together = together * gates.view(*gates.shape[:-1], HEADS, -1)
    return attend.out(together.flatten(-2))


def _turned(x: Tensor, rotated: int) -> Tensor:
    half = rotated // 2
    angles = torch.arange(x.shape[-2]).double()[:, None] * 10_000.0 ** (-torch.arange(half).double() / half)
    plane = torch.complex(x[..., :half], x[..., half:rotated]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([plane.real, plane.imag, x[..., rotated:]], -1)


def _allowed(names: tuple[str, ...], valid: Tensor) -> Tensor:
    keys, queries = torch.arange(9), torch.arange(9)[:, None]
    allowed = (keys <= queries) & (keys < valid[:, None, None])
    if "window" in names:
        allowed = allowed & (queries - keys < 3)
    if "window around" in names:
        allowed = allowed & ((queries - keys).abs() <= 2)
    return allowed


@pytest.mark.parametrize("names", pairs(), ids=" and ".join)
def test_output_and_gradients_are_those_of_the_formula(names: tuple[str, ...]) -> None:
    attend, x = made(names), torch.randn(2, 9, DIM, dtype=torch.float64, requires_grad=True)
    valid = torch.tensor([9, 2])  # with a window, the second sequence has rows without keys
    ours = attend(x, mask=causal() & lengths(valid))
    exact = formula(attend, x, _allowed(names, valid))
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-10)
    wanted = (x, *attend.parameters())
    some = torch.randn_like(ours)
    got, right = (torch.autograd.grad(one, wanted, some) for one in (ours, exact))
    torch.testing.assert_close(got, right, rtol=1e-8, atol=1e-9)
    _check_cache_and_map(attend, x.detach())


def _check_cache_and_map(attend: MultiHeadAttention, x: Tensor) -> None:
    """A few positions at a time, and the map times the values, give the same output."""
    with torch.inference_mode():
        whole, weights = attend(x, mask=causal(), return_weights=True)
        first, cache = attend.extend(x[:, :4], None)
        last, cache = attend.extend(x[:, 4:], cache)
        torch.testing.assert_close(torch.cat([first, last], 1), whole, rtol=1e-9, atol=1e-10)
        value = attend.project(x).value.repeat_interleave(HEADS // attend.num_kv_heads, 1)
        heads = (weights.dense() @ value).transpose(1, 2)
        if attend.gate is not None:
            heads = heads * torch.sigmoid(attend.gate(x)).unflatten(-1, (HEADS, -1))
        torch.testing.assert_close(attend.out(heads.flatten(-2)), whole, rtol=1e-9, atol=1e-10)


def test_autocast_normalises_heads_in_the_precision_of_the_norm() -> None:
    attend, x = MultiHeadAttention(32, 2, qk_norm=nn.RMSNorm), torch.randn(1, 5, 32)
    with torch.autocast("cpu", torch.bfloat16):
        query, key = attend.project_heads(x, 0, 1)
        (plain,) = MultiHeadAttention.project_heads(_without_norms(attend), x, 0)
    assert query.dtype == key.dtype == torch.bfloat16
    exact = plain.double() / plain.double().square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(query.double(), exact, rtol=2**-8, atol=1e-6)


def _without_norms(attend: MultiHeadAttention) -> MultiHeadAttention:
    other = MultiHeadAttention(32, 2)
    other.load_state_dict({name: weight for name, weight in attend.state_dict().items() if "norm" not in name})
    return other


def test_cross_attention_has_no_window() -> None:
    attend, memory = MultiHeadAttention(8, 2, window=1), torch.randn(1, 5, 8)
    weights = attend(torch.randn(1, 5, 8), memory, return_weights=True).weights
    assert bool((weights.dense() > 0).all())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sink": True, "normalization": "sparsemax"}, "a sink is one more key of a softmax"),
        ({"gate": "tokens"}, "gate must be one of None, head, element"),
        ({"window": 0}, "at least 1"),
        ({"normalization": "hardmax"}, "is not known"),
    ],
)
@pytest.mark.usefixtures("as_installed")
def test_parts_that_do_not_fit_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        MultiHeadAttention(8, 2, **settings)


MODERN = DecoderOnlyConfig(
    dim=16, num_heads=4, num_kv_heads=2, num_layers=4, feed_forward_dim=24, activation="swiglu", norm="rms",
    layers="2 sliding, 1 full", window=3, rotary_fraction=0.5, no_positions_every=3, qk_norm=True, gate="head",
    sink=True, dropout=0.0,
)  # fmt: skip


def test_layers_follow_the_pattern() -> None:
    model = DecoderOnly(MODERN, vocab_size=11).eval()
    maps = model.attend(torch.randint(4, 11, (1, 8)))
    seen = [bool((weights.dense()[0, :, 7, :5] > 0).any()) for weights in maps.values()]
    assert seen == [False, False, True, False]
    rotaries = [layer.self_attention.rotary for layer in model.each_layer()]
    assert [rotary is None for rotary in rotaries] == [False, False, True, False]
    assert {rotary.rotated for rotary in rotaries if rotary is not None} == {2}


def test_padded_prompts_decode_as_they_do_alone() -> None:
    model = DecoderOnly(MODERN, vocab_size=11).eval()
    prompts, sizes = torch.randint(4, 11, (3, 7)), [7, 2, 5]
    following = torch.randint(4, 11, (3, 4))
    with torch.inference_mode():
        state, together = model.start(prompts, torch.tensor(sizes)), []
        state = model.reorder(state, torch.tensor([2, 0, 1]))
        for tokens in following.T:
            step = model.step(state, tokens)
            state = step.state
            together.append(step.logits)
        for row, place in enumerate([2, 0, 1]):
            alone = torch.cat([prompts[place, : sizes[place]], following[row]])
            exact = model(alone[None])[0, -4:]
            torch.testing.assert_close(torch.stack(together, 1)[row], exact, rtol=1e-4, atol=1e-5)


def test_an_encoders_window_has_the_query_in_its_middle() -> None:
    config = EncoderOnlyConfig(dim=8, num_heads=2, num_layers=1, feed_forward_dim=8, layers="sliding", window=3)
    maps = EncoderOnly(config, vocab_size=11).eval().attend(torch.randint(4, 11, (1, 5)), torch.tensor([5]))
    near = (torch.arange(5)[:, None] - torch.arange(5)).abs() <= 1
    assert torch.equal(maps["encoder.0"].dense()[0, 0] > 0, near)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"dim": 9, "num_heads": 3, "positions": "rotary"}, "dim / num_heads must be even, got 9 / 3"),
        ({"layers": "5 local"}, 'layers are written like "5 sliding, 1 full"'),
        ({"layers": "0 full"}, "layers are written like"),
        ({"layers": "sliding"}, "give --model.window"),
        ({"window": 8}, "leave the window out"),
        ({"layers": "sliding", "window": 0}, "window must be at least 1"),
        ({"rotary_fraction": 0.0}, "rotary_fraction must be above 0"),
        ({"rotary_fraction": 0.5, "positions": "learned"}, "are for rotary positions"),
        ({"no_positions_every": 0}, "no_positions_every must be at least 1"),
        ({"gate": "yes"}, "gate must be one of none, head, element"),
    ],
)
@pytest.mark.usefixtures("as_installed")
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        DecoderOnlyConfig(**settings)
    if settings.get("window") == 8:
        with pytest.raises(ArgumentError, match="it must be odd, got 8"):
            EncoderOnlyConfig(layers="sliding", window=8)
