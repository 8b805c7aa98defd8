"""Every bias, in two writings."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

import regard
from regard.call.biases import Disentangled, Forgetting, Shaw
from tests.fuzz.core.parts import Added, Score, Sides, Tensors
from tests.fuzz.drawing import Drawn


def _distance(sides: Sides, offset: int | None) -> Tensor:
    """How far each key stands after each query: (T, S)."""
    offset = sides.keys - sides.queries if offset is None else offset
    return torch.arange(sides.keys) - (torch.arange(sides.queries)[:, None] + offset)


def _dense(drawn: Drawn, sides: Sides, score: Score) -> Added:
    full = sides.full[-2:] if drawn.chance(3) else sides.full
    shape = [n if drawn.chance() else 1 for n in full]
    tensor = drawn.normal(*shape) * drawn.of([1.0, 0.0, 10.0, 1e3])
    share = drawn.of([0.0, 0.2, 0.9])
    tensor = tensor.masked_fill(drawn.bools(*shape, share=share), -math.inf)

    def formula(t: Tensors, q: Tensor, k: Tensor) -> Tensor:
        return t["bias"].expand(sides.full).reshape(sides.flat_full)

    return Added(f"tensor {tuple(shape)} with {share} of -inf", lambda t: t["bias"], formula, {"bias": tensor})


def _alibi(drawn: Drawn, sides: Sides, score: Score) -> Added:
    offset = drawn.of([None, drawn.number(-3, 5)])
    if drawn.chance():
        tensors = {"slopes": drawn.normal(sides.heads) * drawn.of([1.0, 100.0])}
        return Added(
            f"ALiBi(slopes, {offset})", lambda t: regard.ALiBi(t["slopes"], offset=offset),
            lambda t, q, k: -t["slopes"][:, None, None] * _distance(sides, offset).abs(), tensors,
        )  # fmt: skip
    power = 2 ** (sides.heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    slopes += [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)][: sides.heads - power]
    fixed = torch.tensor(slopes, dtype=torch.float64)
    return Added(
        f"ALiBi({sides.heads}, {offset})", lambda t: regard.ALiBi(sides.heads, offset=offset),
        lambda t, q, k: -fixed[:, None, None] * _distance(sides, offset).abs(),
    )  # fmt: skip


def _t5(drawn: Drawn, sides: Sides, score: Score) -> Added:
    both, offset = drawn.chance(), drawn.of([None, drawn.number(-3, 5)])
    buckets = drawn.of([8, 4, 32]) if both else drawn.of([4, 2, 3, 32])
    longest = drawn.of([128, 20])

    def bucket(distance: int) -> int:
        """Written for one distance, as section 2.1 of Raffel et al. describes it."""
        side = buckets // 2 if both else buckets
        away = abs(distance) if both else max(-distance, 0)
        exact = side // 2
        if away >= exact:
            ratio = torch.tensor(away / exact, dtype=torch.float32).log() / math.log(longest / exact)
            away = min(side - 1, exact + int(ratio * (side - exact)))
        return away + (side if both and distance > 0 else 0)

    where = torch.tensor([[bucket(d) for d in row] for row in _distance(sides, offset).tolist()])
    return Added(
        f"T5Bias({buckets}, bidirectional={both}, {longest}, {offset})",
        lambda t: regard.T5Bias(t["table"], both, longest, offset),
        lambda t, q, k: t["table"][where].movedim(-1, 0), {"table": drawn.normal(buckets, sides.heads)},
    )  # fmt: skip


def _shaw(drawn: Drawn, sides: Sides, score: Score) -> Added:
    reach, offset = drawn.number(0, 4), drawn.of([None, drawn.number(-3, 5)])
    factor = sides.dim**-0.5 if score.scale is None else score.scale
    where = _distance(sides, offset).clamp(-reach, reach) + reach

    def formula(t: Tensors, q: Tensor, k: Tensor) -> Tensor:
        return factor * torch.einsum("bhtd,tsd->bhts", q, t["table"][where])

    return Added(
        f"Shaw({reach}, {score.scale}, {offset})", lambda t: Shaw(t["table"], score.scale, offset), formula,
        {"table": drawn.normal(2 * reach + 1, sides.dim)},
    )  # fmt: skip


def _disentangled(drawn: Drawn, sides: Sides, score: Score) -> Added:
    """With k = 4, distances up to 2 have rows of their own, one row takes all from 3 to 31, and one the others."""
    offset = drawn.of([None, drawn.number(-2, 3)])
    away = -_distance(sides, offset)
    place = (4 + away.clamp(-3, 3) + away.sign() * (away.abs() > 31)).clamp(0, 7)
    factor = sides.dim**-0.5 if score.scale is None else score.scale

    def formula(t: Tensors, q: Tensor, k: Tensor) -> Tensor:
        by_key, by_query = t["keys"][:, place], t["queries"][:, place]
        return factor * (torch.einsum("bhtd,htsd->bhts", q, by_key) + torch.einsum("bhsd,htsd->bhts", k, by_query))

    return Added(
        f"Disentangled({score.scale}, {offset})",
        lambda t: Disentangled(t["keys"], t["queries"], score.scale, 32, offset), formula,
        {name: drawn.normal(sides.heads, 8, sides.dim) for name in ("keys", "queries")},
    )  # fmt: skip


def _forgetting(drawn: Drawn, sides: Sides, score: Score) -> Added:
    """Query i stands at position S - T + i; the sums and their differences are eighths, which bfloat16 holds too."""
    if sides.queries > sides.keys:
        return _dense(drawn, sides, score)
    sums = -drawn.integers(0, 3, *sides.leading, 1, sides.keys).double().cumsum(-1) / 8

    def formula(t: Tensors, q: Tensor, k: Tensor) -> Tensor:
        c = t["sums"].expand(*sides.leading, 1, sides.keys).reshape(sides.flat, sides.heads, 1, sides.keys)
        return c[..., sides.keys - sides.queries :].mT - c

    return Added("Forgetting", lambda t: Forgetting(t["sums"]), formula, {"sums": sums})


BIASES: tuple[Callable[[Drawn, Sides, Score], Added], ...] = (
    _dense, _alibi, _t5, _forgetting, _shaw, _disentangled,
)  # fmt: skip


def random_bias(drawn: Drawn, sides: Sides, score: Score) -> Added | None:
    if not drawn.chance():
        return None
    return drawn.of(BIASES if score.is_dot else BIASES[:4])(drawn, sides, score)
