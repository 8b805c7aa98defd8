"""The ground `pairs`: two parts of a call that are right alone, together, against the dense formula in float64.

Each case takes two parts, and of each a kind other than the plain one; all others are plain.
"""

import math
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
from hypothesis import note
from torch import Tensor

import regard
from regard.call.biases.combined import Forgetting
from regard.errors import RegardError
from regard.nn import MultiHeadAttention
from tests.fuzz.drawing import Drawn

B, H, T, S, D = 2, 2, 5, 7, 4
COUNTS: Counter[tuple[str, str]] = Counter()
"""How many cases had each two kinds."""


def _threshold(scores: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    """The weights of(s - tau) whose rows sum to 1, by bisection."""
    peak = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    low, high = peak - 2.0, peak
    for _ in range(60):
        middle = (low + high) / 2
        is_low = of(scores - middle).sum(-1, keepdim=True) > 1
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return of(scores - low)


def _softpick(scores: Tensor) -> Tensor:
    sizes = torch.expm1(scores)
    total = sizes.abs().masked_fill(scores == -torch.inf, 0.0).sum(-1, keepdim=True)
    return sizes.clamp_min(0.0) / torch.where(total > 0, total, 1.0)


NORMALIZATIONS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "softmax": (regard.Softmax(), lambda s: s.softmax(-1).nan_to_num()),
    "sink": (regard.SoftmaxWithSink(0.5), lambda s: s.exp() / (math.exp(0.5) + s.exp().sum(-1, keepdim=True))),
    "sigmoid": (regard.Sigmoid(-0.5), lambda s: (s - 0.5).sigmoid()),
    "sparsemax": (regard.Sparsemax(), lambda s: _threshold(s, torch.relu)),
    "entmax": (regard.Entmax15(), lambda s: _threshold(s / 2, lambda x: x.relu().square())),
    "softpick": (regard.call.normalizations.Softpick(), _softpick),
    "unnormalized": (regard.call.normalizations.Unnormalized(), torch.exp),
}
SCORES: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "scaled": (regard.ScaledDot(), lambda s: s / D**0.5),
    "a scale below 0": (regard.ScaledDot(-0.7), lambda s: -0.7 * s),
    "a scale of 0": (regard.ScaledDot(0.0), lambda s: 0 * s),
    "capped": (regard.SoftCapped(regard.ScaledDot(), 0.8), lambda s: 0.8 * (s / D**0.5 / 0.8).tanh()),
}
FROM_KEY = torch.arange(T)[:, None] + S - T - torch.arange(S)
"""How far each query stands behind each key."""
MASKS: dict[str, tuple[Any, Tensor]] = {
    "everything": (None, torch.ones(T, S, dtype=torch.bool)),
    "causal": (regard.causal(), torch.ones(T, S, dtype=torch.bool).tril(S - T)),
    "causal from 0": (regard.causal(-1), torch.ones(T, S, dtype=torch.bool).tril(-1)),
    "lengths": (
        regard.lengths(torch.tensor([0, 4])),
        (torch.arange(S) < torch.tensor([[0], [4]]))[:, None, None].expand(B, H, T, S),
    ),
    "window": (regard.window(2), (FROM_KEY >= 0) & (FROM_KEY < 2)),
}

BIASES: dict[str, Callable[[Tensor], tuple[Any, Tensor | float]]] = {
    "none": lambda x: (None, 0.0),
    "dense": lambda x: (x, x),
    "a number a key": lambda x: (x[:, :, :1], x[:, :, :1]),
    "a number a query": lambda x: (x[..., :1], x[..., :1]),
    "far from 0": lambda x: (x - 300, x - 300),
    "alibi": lambda x: (regard.ALiBi(H), -regard.call.biases.alibi_slopes(H).double()[:, None, None] * FROM_KEY.abs()),
    "a gate": lambda x: (Forgetting(-x[:, :, :1].abs().cumsum(-1)), _forgotten(-x[:, :, 0].abs().cumsum(-1))),
}
STATES = {
    "plain": {},
    "autocast": {"autocast": True},
    "vmap": {"vmap": True},
    "gradients": {"gradients": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "tiled": {"backend": "tiled"},
    "reference": {"backend": "reference"},
}
PARTS: dict[str, tuple[str, ...]] = {
    "normalization": (*NORMALIZATIONS,),
    "score": (*SCORES,),
    "mask": (*MASKS,),
    "bias": (*BIASES,),
    "state": (*STATES,),
}


def _forgotten(sums: Tensor) -> Tensor:
    return sums[..., S - T :, None] - sums[..., None, :]


def case(drawn: Drawn) -> None:
    if drawn.chance(4):
        _module(drawn)
        return
    chosen = {part: kinds[0] for part, kinds in PARTS.items()}
    for part in drawn.of([*combinations(PARTS, 2)]):
        chosen[part] = drawn.of(PARTS[part][1:])
    kinds = [kind for part, kind in chosen.items() if kind != PARTS[part][0]]
    COUNTS[kinds[0], kinds[1]] += 1
    note(" x ".join(kinds))
    state: dict[str, Any] = dict(STATES[chosen["state"]])
    query, key, value = (drawn.normal(B, H, length, D) for length in (T, S, S))
    if "dtype" in state:
        query, key, value = (x.to(state["dtype"]).double() for x in (query, key, value))
    bias, added = BIASES[chosen["bias"]](drawn.normal(B, H, T, S))
    (mask, allowed), (normalization, weigh) = MASKS[chosen["mask"]], NORMALIZATIONS[chosen["normalization"]]
    score, of_dots = SCORES[chosen["score"]]
    dense = weigh((of_dots(query @ key.mT) + added).masked_fill(~allowed, -torch.inf))
    narrow = state.get("dtype", torch.float32 if "autocast" in state else torch.float64)
    given = [x.to(narrow).requires_grad_("gradients" in state) for x in (query, key, value)]
    options: dict[str, Any] = {"score": score, "normalization": normalization, "mask": mask, "bias": bias}
    if "vmap" in state:
        _under_vmap(given, options, dense)
        return
    output, weights = regard.attention(*given, **options, backend=state.get("backend"), return_weights=True)
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in state):
        _check(weights, dense, 1e-9 if narrow == torch.float64 else 1e-4)
    if narrow == torch.float64:
        _close(output, dense @ value, 1e-9)


def _under_vmap(given: list[Tensor], options: dict[str, Any], dense: Tensor) -> None:
    """A copy of the call at a time gives what the call gives."""
    try:
        found = torch.vmap(lambda q: regard.attention(q, *given[1:], **options))(torch.stack([given[0]] * 2))
    except RegardError:
        return
    _close(found, (dense @ given[2]).expand_as(found), 1e-9)


def _close(ours: Tensor, exact: Tensor, tolerance: float) -> None:
    size = max(1.0, float(exact.detach().abs().max()))
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=tolerance * size, check_dtype=False)


def _check(weights: regard.AttentionMap, dense: Tensor, tolerance: float) -> None:
    _close(weights.dense(), dense, tolerance)
    _close(weights[..., 2, :], dense[..., 2, :], tolerance)
    _close(weights.received(), dense.sum(-2), 10 * tolerance)
    _close(weights.top_keys(1).values[..., 0], dense.amax(-1), tolerance)
    _close(weights.entropy(), -torch.xlogy(dense, dense).sum(-1), 50 * tolerance)
    x = torch.linspace(-1, 1, 2 * S, dtype=torch.float64).view(S, 2)
    _close(weights @ x.to(weights.dtype), dense @ x, 10 * tolerance)
    _close(weights.pooled(2, 3, "sum").sum((-2, -1)), dense.sum((-2, -1)), 50 * tolerance)


MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sink": {"sink": True},
    "a gate a head": {"gate": "head"},
    "grouped": {"num_kv_heads": 1},
    "window": {"window": 2},
    "rotary": {"rotary": regard.Rotary(D)},
    **{name: {"normalization": name} for name in ("sigmoid", "softpick", "sparsemax", "entmax15")},
}
BESIDE = ("nothing", "a hook", "a gate", "alibi", "autocast")


def _module(drawn: Drawn) -> None:
    """A module reads a text in pieces, from a cache, and at once."""
    name, beside = drawn.of([*MODULES]), drawn.of(BESIDE)
    COUNTS[f"module: {name}", f"a cache and {beside}"] += 1
    note(f"{name} x a cache and {beside}")
    torch.manual_seed(drawn.number(0, 99))
    attend = MultiHeadAttention(H * D, H, **MODULES[name]).double().eval()
    x, sums = drawn.normal(B, S, H * D), -drawn.normal(B, H, 1, S).abs().cumsum(-1)

    def bias(length: int) -> Any:
        return {"a gate": Forgetting(sums[..., :length]), "alibi": regard.ALiBi(H)}.get(beside)

    with torch.no_grad():
        right = attend(x, mask=regard.causal(), bias=bias(S), backend="reference")
        if beside == "a hook":
            attend.register_forward_hook(lambda module, given, output: 2 * output)
            right = 2 * right
        found, cache, start = [], None, 0
        while start < S:
            stop = drawn.number(start + 1, S)
            with torch.autocast("cpu", torch.bfloat16, enabled=beside == "autocast"):
                output, cache = attend.extend(x[:, start:stop], cache, bias=bias(stop))
            found.append(output)
            start = stop
    _close(torch.cat(found, 1), right, 1e-9)
