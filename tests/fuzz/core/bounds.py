"""How far arithmetic may be off: from the numbers that were summed, and the units in the last place of a dtype."""

import torch
from torch import Tensor

from tests.fuzz.core.calls import Call, Dense


def unit(dtype: torch.dtype) -> float:
    """The unit in the last place of what a dtype is computed in: half precision is computed in float32."""
    return torch.finfo(weight_dtype(dtype)).eps


def score_error(call: Call, dense: Dense) -> Tensor:
    eps = torch.finfo(call.dtype).eps if call.score.rounds else unit(call.dtype)
    return (8 * eps + 8 * unit(call.dtype) * call.sides.dim**0.5) * (dense.size + 1e-3)


def weight_error(call: Call, dense: Dense) -> Tensor | None:
    found = _weight_error(call, dense, score_error(call, dense))
    # Below its smallest number a dtype has nothing.
    return None if found is None else found + 2 * torch.finfo(weight_dtype(call.dtype)).tiny


def weight_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _weight_error(call: Call, dense: Dense, each: Tensor) -> Tensor | None:
    row = torch.where(dense.allowed, each, 0.0).amax(-1, keepdim=True) if each.numel() else each
    if each.numel() and float(row.max()) > 0.3:
        return None
    u = unit(call.dtype)
    match call.norm.name.split("(")[0]:
        case "Softmax" | "SoftmaxWithSink":
            return dense.weights * (torch.expm1(2 * row) + 200 * u) + u * 1e-3
        case "Sigmoid":
            return each / 4 + 8 * u
        case "Unnormalized":
            return dense.weights * (torch.expm1(each) + 16 * u)
    return (2 * row + 16 * u).expand(dense.weights.shape)


def output_error(call: Call, dense: Dense, of_weights: Tensor) -> Tensor:
    """For each number of the output, how far it may be off, from how far the weights may be off."""
    size = dense.weights @ dense.value.abs()
    rounding = 4 * torch.finfo(call.dtype).eps + 4 * unit(call.dtype) * call.sides.keys**0.5
    return of_weights.to(dense.value.dtype) @ dense.value.abs() + rounding * size + 2 * torch.finfo(call.dtype).tiny


def require_close(name: str, ours: Tensor, right: Tensor, error: Tensor) -> None:
    assert ours.shape == right.shape, f"{name} has the shape {tuple(ours.shape)}, and not {tuple(right.shape)}"
    off = (ours.detach().double() - right.detach()).abs()
    bad = ~(off <= error)
    if not bad.any():
        return
    at = tuple(int(i) for i in bad.nonzero()[0])
    raise AssertionError(
        f"{name}: {float(ours[at])} at {at}, and not {float(right[at])}; it may be off by "
        f"{float(error.expand(right.shape)[at]):.3g}; {int(bad.sum())} of {bad.numel()} are wrong"
    )
