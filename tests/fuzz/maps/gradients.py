"""Gradients of random sums of smooth statistics, against autograd of the same sums of the dense formulas."""

from collections.abc import Callable
from dataclasses import replace

import torch
from hypothesis import assume, note
from torch import Tensor

import regard
from tests.fuzz.core.bounds import require_close
from tests.fuzz.core.calls import random_call, require_reasonable
from tests.fuzz.core.checks import BACKENDS, gradient_bound, gradients_of
from tests.fuzz.drawing import Drawn
from tests.maps.dense_maps import sums_written_out


def check_gradients_of_statistics(drawn: Drawn) -> None:
    call = replace(random_call(drawn, longest=17), dtype=torch.float64)
    leaves = call.leaves(grad=True)
    dense = call.dense(leaves)
    require_reasonable(call, dense)
    assume(call.norm.name != "Unnormalized" and dense.weights.numel() > 0)
    bound = gradient_bound(call, dense, leaves)
    names = drawn.some(sorted(STATISTICS), 2) or ["received"]
    queries, keys = dense.weights.shape[-2:]
    factors = {name: drawn.normal(queries + keys + 9) for name in names}
    x = drawn.normal(keys, 2)
    right_weights = call.laid_out(dense.weights)
    right = gradients_of(_sum([STATISTICS[n][1](right_weights, x) for n in names], factors, names), leaves)
    # ln P has no bound where P is next to nothing.
    smallest = dense.weights.detach()[dense.weights.detach() > 0]
    steep = 100 * (queries + keys) * (1 + float(smallest.log().abs().max()) if smallest.numel() else 1.0)
    assume(bound * steep < 1e-2)
    for backend in BACKENDS:
        leaves = call.leaves(grad=True)
        vectors, given = call.as_given(leaves)
        try:
            weights = regard.attention(*vectors, **given, backend=backend, return_weights=True).weights
        except regard.errors.BackendError:
            continue
        note(f"gradient of {names} on {backend}")
        found = gradients_of(_sum([STATISTICS[n][0](weights, x) for n in names], factors, names), leaves)
        for name, mine in found.items():
            require_close(f"{backend}: gradient of {names} in {name}", mine, right[name], torch.tensor(bound * steep))


def _sum(answers: list[Tensor], factors: dict[str, Tensor], names: list[str]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for name, answer in zip(names, answers, strict=True):
        flat = answer.reshape(-1)
        total = total + (flat * factors[name].repeat(-(-len(flat) // len(factors[name])))[: len(flat)]).sum()
    return total


def _written_out(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda dense, x: sums_written_out(dense, 1, 1)[name]


STATISTICS = {
    "received": (lambda m, x: m.received(), _written_out("received")),
    "entropy": (lambda m, x: m.entropy(), _written_out("entropy")),
    "participation_ratio": (lambda m, x: m.participation_ratio(), _written_out("participation_ratio")),
    "distance": (lambda m, x: m.distance(), _written_out("distance")),
    "product": (lambda m, x: m @ x, lambda d, x: d @ x),
    "block": (
        lambda m, x: m.block(range(min(2, m.shape[-2])), range(min(3, m.shape[-1]))),
        lambda d, x: d[..., :2, :3],
    ),
    "pooled": (lambda m, x: m.pooled(1, 1, "sum"), _written_out("pooled_sum")),
    "points": (
        lambda m, x: m[..., torch.tensor([0, -1]), torch.tensor([-1, 0])],
        lambda d, x: d[..., torch.tensor([0, -1]), torch.tensor([-1, 0])],
    ),
}
"""Each asked of the map, and written out on the dense weights."""
