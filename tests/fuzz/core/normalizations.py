"""Every normalization, in two writings."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

import regard
from tests.fuzz.core.parts import Norm, Sides, Tensors
from tests.fuzz.drawing import Drawn


def softmax_of(scores: Tensor, more: Tensor | None = None) -> Tensor:
    """exp(s) / sum exp(s), where the sum may have one more term exp(more); rows of -inf are 0."""
    peak = scores.detach().amax(-1, keepdim=True)
    if more is not None:
        peak = torch.maximum(peak, more.detach())
    peak = torch.where(peak == -math.inf, 0.0, peak)
    exponentials = (scores - peak).exp()
    total = exponentials.sum(-1, keepdim=True)
    if more is not None:
        total = total + (more - peak).exp()
    return exponentials / torch.where(total == 0, 1.0, total)


def _sink(drawn: Drawn, sides: Sides) -> Norm:
    kind = drawn.of(["float", "scalar", "per head"])
    number = drawn.of([0.0, 3.0, -50.0, 60.0])
    tensors = {} if kind == "float" else {"sink": drawn.normal(*([sides.heads] if kind == "per head" else [])) + number}

    def formula(t: Tensors, scores: Tensor) -> Tensor:
        sink = t.get("sink", torch.tensor(number, dtype=scores.dtype))
        return softmax_of(scores, sink.reshape(-1, 1, 1) if sink.dim() else sink.reshape(1, 1, 1))

    return Norm(
        f"SoftmaxWithSink({kind} {number})", lambda t: regard.SoftmaxWithSink(t.get("sink", number)), formula, tensors
    )


def _sigmoid(drawn: Drawn, sides: Sides) -> Norm:
    shift = drawn.of([0.0, -2.0, 3.0])
    return Norm(f"Sigmoid({shift})", lambda t: regard.Sigmoid(shift), lambda t, s: torch.sigmoid(s + shift))


def _support_sum(scores: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    count = inside.sum(-1, keepdim=True).clamp_min(1)
    return count, torch.where(inside, scores, 0.0).sum(-1, keepdim=True)


def sparsemax_of(scores: Tensor) -> Tensor:
    """The projection onto the simplex: tau by dropping what lies below the mean until nothing does."""
    inside = scores > -math.inf
    for _ in range(scores.shape[-1]):
        count, total = _support_sum(scores.detach(), inside)
        inside = inside & (scores > (total - 1) / count)
    count, total = _support_sum(scores, inside)
    return torch.where(inside, torch.where(inside, scores, 0.0) - (total - 1) / count, 0.0)


def entmax15_of(scores: Tensor) -> Tensor:
    """max(s / 2 - tau, 0)^2: tau by bisection, and once more in closed form, for its gradient."""
    half = scores / 2
    dead = (half == -math.inf).all(-1, keepdim=True)
    peak = torch.where(dead, 0.0, half.detach().amax(-1, keepdim=True))
    low, high = peak - 1, peak
    for _ in range(80):
        middle = (low + high) / 2
        above = (half.detach() - middle).clamp_min(0).square().sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    inside = half > low
    count, total = _support_sum(half, inside)
    mean = total / count
    spread = torch.where(inside, torch.where(inside, half, 0.0) - mean, 0.0).square().sum(-1, keepdim=True)
    tau = mean - ((1 - spread) / count).clamp_min(0).sqrt()
    return torch.where(inside, (torch.where(inside, half, 0.0) - tau).clamp_min(0).square(), 0.0)


def softpick_of(scores: Tensor) -> Tensor:
    """max(e^s - 1, 0) over the sum of |e^s - 1|."""
    peak = scores.detach().amax(-1, keepdim=True)
    # Where e^s overflows, 1 is nothing beside it.
    risen = torch.where(peak > 600, torch.exp(scores - peak), torch.expm1(scores.clamp_max(600)))
    risen = torch.where(scores == -torch.inf, 0.0, risen)
    total = risen.abs().sum(-1, keepdim=True)
    return risen.clamp_min(0.0) / torch.where(total > 0, total, 1.0)


NORMS: tuple[Callable[[Drawn, Sides], Norm], ...] = (
    lambda drawn, sides: Norm("Softmax", lambda t: regard.Softmax(), lambda t, s: softmax_of(s)),
    _sink,
    _sigmoid,
    lambda drawn, sides: Norm(
        "Unnormalized", lambda t: regard.call.normalizations.Unnormalized(), lambda t, s: s.exp()
    ),
    lambda drawn, sides: Norm("Sparsemax", lambda t: regard.Sparsemax(), lambda t, s: sparsemax_of(s)),
    lambda drawn, sides: Norm("Softpick", lambda t: regard.call.normalizations.Softpick(), lambda t, s: softpick_of(s)),
    lambda drawn, sides: Norm("Entmax15", lambda t: regard.Entmax15(), lambda t, s: entmax15_of(s)),
)


def random_norm(drawn: Drawn, sides: Sides) -> Norm:
    return drawn.of([NORMS[0], drawn.of(NORMS)])(drawn, sides)
