"""Every score, in two writings."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

import regard
from tests.fuzz.core.parts import Score, Sides, Tensors
from tests.fuzz.drawing import Drawn


def _products(query: Tensor, key: Tensor) -> Tensor:
    return query.abs() @ key.abs().mT


def _differences(query: Tensor, key: Tensor) -> Tensor:
    return query[..., :, None, :] - key[..., None, :, :]


def _distance(query: Tensor, key: Tensor) -> Tensor:
    squared = _differences(query, key).square().sum(-1)
    # The root has no gradient at 0; regard takes 0 there.
    return torch.where(squared > 0, torch.where(squared > 0, squared, 1.0).sqrt(), 0.0)


def _each(value: Tensor) -> Tensor:
    return value.reshape(-1, 1, 1) if value.dim() else value


def _scaled(drawn: Drawn, sides: Sides) -> Score:
    scale = drawn.of([None, 1.0, 0.3, -1.0, 0.0, -0.01, 40.0, 1e-3])
    factor = sides.dim**-0.5 if scale is None else scale
    return Score(
        f"ScaledDot({scale})", lambda t: regard.ScaledDot(scale), lambda t, q, k: factor * (q @ k.mT),
        lambda t, q, k: abs(factor) * _products(q, k), is_dot=True, scale=scale,
    )  # fmt: skip


def _capped(drawn: Drawn, sides: Sides) -> Score:
    inner = drawn.of([_scaled, _bilinear])(drawn, sides)
    cap = drawn.of([30.0, 1.0, 0.1, 1e3])
    return Score(
        f"SoftCapped({inner.name}, {cap})", lambda t: regard.SoftCapped(inner.make(t), cap),
        lambda t, q, k: cap * (inner.formula(t, q, k) / cap).tanh(), inner.size, inner.tensors, inner.rounds,
        inner.is_dot, inner.scale,
    )  # fmt: skip


def _cosine(drawn: Drawn, sides: Sides) -> Score:
    kind = drawn.of(["float", "scalar", "per head"])
    number = drawn.of([1.0, 10.0, -2.0, 0.0])
    tensors = {"temperature": _numbers(drawn, sides, kind) * number} if kind != "float" else {}

    def temperature(t: Tensors) -> Tensor:
        return _each(t.get("temperature", torch.tensor(number, dtype=torch.float64)))

    def formula(t: Tensors, q: Tensor, k: Tensor) -> Tensor:
        unit = [x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in (q, k)]
        return temperature(t) * (unit[0] @ unit[1].mT)

    return Score(
        f"Cosine({kind} {number})", lambda t: regard.Cosine(t.get("temperature", number)), formula,
        lambda t, q, k: temperature(t).abs() + 1e-6 + 0 * (q @ k.mT), tensors, rounds=True,
    )  # fmt: skip


def _numbers(drawn: Drawn, sides: Sides, kind: str) -> Tensor:
    return drawn.normal(*([sides.heads] if kind == "per head" else [])).abs() + 0.5


def _bilinear(drawn: Drawn, sides: Sides) -> Score:
    return Score(
        "Bilinear", lambda t: regard.Bilinear(t["weight"]), lambda t, q, k: q @ t["weight"] @ k.mT,
        lambda t, q, k: q.abs() @ t["weight"].abs() @ k.abs().mT, {"weight": drawn.normal(sides.dim, sides.dim)},
        rounds=True,
    )  # fmt: skip


def _additive(drawn: Drawn, sides: Sides) -> Score:
    hidden = drawn.of([3, 1])
    is_projected = drawn.chance(4)
    hidden = sides.dim if is_projected else hidden
    tensors = {"vector": drawn.normal(hidden)}
    if not is_projected:
        tensors |= {"query": drawn.normal(hidden, sides.dim), "key": drawn.normal(hidden, sides.dim)}

    def parts(t: Tensors, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if is_projected else (q @ t["query"].mT, k @ t["key"].mT)

    def formula(t: Tensors, q: Tensor, k: Tensor) -> Tensor:
        q, k = parts(t, q, k)
        return (q[..., :, None, :] + k[..., None, :, :]).tanh() @ t["vector"]

    def size(t: Tensors, q: Tensor, k: Tensor) -> Tensor:
        q, k = parts({n: x.abs() for n, x in t.items()}, q.abs(), k.abs())
        return (1 + q[..., :, None, :] + k[..., None, :, :]) @ t["vector"].abs()

    return Score(
        "Additive", lambda t: regard.Additive(t["vector"], t.get("query"), t.get("key")), formula, size, tensors,
        rounds=True,
    )  # fmt: skip


Kernel = Callable[[Tensor], Tensor]


def _kernel(kind: type, log_kernel: Kernel) -> Callable[[Drawn, Sides], Score]:
    def make(drawn: Drawn, sides: Sides) -> Score:
        how = drawn.of(["float", "scalar", "per head"])
        number = drawn.of([1.0, 3.0, 0.3])
        tensors = {"width": _numbers(drawn, sides, how) * number} if how != "float" else {}

        def u(t: Tensors, q: Tensor, k: Tensor) -> Tensor:
            return _distance(q, k) / _each(t.get("width", torch.tensor(number, dtype=torch.float64)))

        def size(t: Tensors, q: Tensor, k: Tensor) -> Tensor:
            width = _each(t.get("width", torch.tensor(number, dtype=torch.float64)))
            # How far a kernel's logarithm moves when u moves: without bound where the kernel ends.
            ends = 1 / (1 - u(t, q, k)).abs().clamp_min(1e-300) if kind in COMPACT else 0.0
            return 1 + (q.norm(dim=-1)[..., :, None] + k.norm(dim=-1)[..., None, :]).square() / width**2 * (1 + ends)

        return Score(
            f"{kind.__name__}({how} {number})", lambda t: kind(t.get("width", number)),
            lambda t, q, k: log_kernel(u(t, q, k)), size, tensors,
        )  # fmt: skip

    return make


def _custom(drawn: Drawn, sides: Sides) -> Score:
    def function(q: Tensor, k: Tensor) -> Tensor:
        return -_differences(q, k).abs().sum(-1)

    return Score(
        "a function", lambda t: function, lambda t, q, k: function(q, k),
        lambda t, q, k: q.abs().sum(-1)[..., :, None] + k.abs().sum(-1)[..., None, :], rounds=False,
    )  # fmt: skip


def _inside(u: Tensor, value: Callable[[Tensor], Tensor]) -> Tensor:
    inside = u < 1
    return torch.where(inside, value(torch.where(inside, u, 0.0)), -math.inf)


COMPACT = (regard.call.scores.Boxcar, regard.call.scores.Epanechnikov, regard.call.scores.Triangular)
SCORES: tuple[Callable[[Drawn, Sides], Score], ...] = (
    _scaled,
    _capped,
    _cosine,
    _bilinear,
    _additive,
    _kernel(regard.call.scores.Gaussian, lambda u: -u.square() / 2),
    _kernel(regard.call.scores.Laplacian, lambda u: -u),
    _kernel(regard.call.scores.Boxcar, lambda u: _inside(u, lambda x: 0 * x)),
    _kernel(regard.call.scores.Epanechnikov, lambda u: _inside(u, lambda x: (1 - x.square()).log())),
    _kernel(regard.call.scores.Triangular, lambda u: _inside(u, lambda x: (1 - x).log())),
    _kernel(regard.call.scores.Constant, lambda u: 0 * u),
    _custom,
)


def random_score(drawn: Drawn, sides: Sides) -> Score:
    return drawn.of([_scaled, drawn.of(SCORES)])(drawn, sides)
