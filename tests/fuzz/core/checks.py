"""The checks of a random call: its formulas, on every backend; its gradients; its dropout."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import assume, note
from torch import Tensor

import regard
from regard.functional import Attended
from regard.kernels.base import BackendName
from tests.fuzz.core.bounds import output_error, require_close, unit, weight_error
from tests.fuzz.core.calls import Call, Dense, answers, require_reasonable
from tests.fuzz.core.parts import Sides
from tests.fuzz.drawing import Drawn

BACKENDS: tuple[BackendName | None, ...] = (None, "reference", "tiled", "fused")


def check_values(call: Call, drawn: Drawn) -> None:
    with torch.no_grad():
        dense = call.dense(call.leaves(torch.float64))
        require_reasonable(call, dense)
        error = weight_error(call, dense)
        for backend in BACKENDS:
            if (found := answers(call, backend)) is not None:
                note(f"backend {backend}")
                with torch.autocast("cpu", torch.bfloat16, enabled=drawn.chance(4)):  # a map has its own precision
                    _check_one(call, dense, found, error, str(backend))
                _check_bits(call, found, backend)


def _check_one(call: Call, dense: Dense, found: Attended, error: Tensor | None, backend: Any) -> None:
    weights = found.weights.dense()
    assert found.output.dtype == call.dtype
    assert weights.dtype == (torch.float64 if call.dtype == torch.float64 else torch.float32)
    allowed, live = call.laid_out(dense.allowed), call.laid_out(dense.allowed.any(-1))
    assert weights.shape == allowed.shape, f"{backend}: weights of {tuple(weights.shape)}, not {tuple(allowed.shape)}"
    assert (weights[~allowed] == 0).all(), f"{backend}: a weight that the mask excludes is not 0"
    assert (found.output[~live] == 0).all(), f"{backend}: the output of a row with no key is not 0"
    assert weights.isfinite().all(), f"{backend}: a weight is not finite"
    if error is None:
        if call.norm.name == "Softmax":
            assert (weights >= 0).all(), f"{backend}: a weight is negative"
        return
    require_close(f"{backend}: weight", weights, call.laid_out(dense.weights), call.laid_out(error))
    if call.dtype == torch.float16 and dense.output.numel() and float(dense.output.abs().max()) > 6e4:
        return
    bound = output_error(call, dense, error)
    require_close(f"{backend}: output", found.output, call.laid_out(dense.output), call.laid_out(bound))


def _check_bits(call: Call, found: Attended, backend: Any) -> None:
    vectors, given = call.as_given(call.leaves())
    plain = regard.attention(*vectors, **given, backend=backend)
    assert torch.equal(plain, found.output), f"{backend}: asking for the weights changes the output"


def check_copies(call: Call) -> None:
    call = replace(call, dtype=torch.float64)
    vectors, given = call.as_given(call.leaves())
    require_reasonable(call, call.dense(call.leaves()))
    right = regard.attention(*vectors, **given)
    try:
        found = torch.vmap(lambda query: regard.attention(query, *vectors[1:], **given))(torch.stack([vectors[0]] * 2))
    except regard.errors.RegardError as error:
        note(f"refused: {error}")
        return
    size = float(right.abs().max()) if right.numel() else 0.0
    torch.testing.assert_close(found, right.expand_as(found), rtol=0, atol=1e-9 * max(1.0, size))


def check_explained(call: Call) -> None:
    vectors, given = call.as_given(call.leaves())
    explained = regard.explain(*vectors, **given)
    for name in BACKENDS[1:]:
        refuses = answers(call, name) is None
        says = explained.refused.get(str(name), "")
        came_first = f"{explained.backend!r} came first"
        assert refuses == (name != explained.backend and says != came_first), f"explain says of {name}: {says!r}"


def check_gradients(call: Call, drawn: Drawn) -> None:
    call = replace(call, dtype=drawn.of([torch.float64, torch.float64, torch.float32]))
    leaves = call.leaves(torch.float64, grad=True)
    dense = call.dense(leaves)
    require_reasonable(call, dense)
    bound = gradient_bound(call, dense, leaves)
    by_output, by_weights = drawn.normal(*dense.output.shape), drawn.normal(*dense.weights.shape)
    if call.norm.name == "Unnormalized":
        by_weights = by_weights * 0
    loss = (dense.output * by_output).sum() + (dense.weights * by_weights).sum()
    right = gradients_of(loss, leaves)
    for backend in BACKENDS:
        leaves = call.leaves(grad=True)
        vectors, given = call.as_given(leaves)
        try:
            output, weights = regard.attention(*vectors, **given, backend=backend, return_weights=True)
        except regard.errors.BackendError:
            assert backend is not None
            continue
        note(f"gradients of backend {backend}")
        loss = (output * call.laid_out(by_output).to(call.dtype)).sum()
        loss = loss + (weights.dense() * call.laid_out(by_weights).to(call.dtype)).sum()
        for name, mine in gradients_of(loss, leaves).items():
            require_close(f"{backend}: gradient of {name}", mine, right[name], torch.tensor(bound))


def gradients_of(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    if not loss.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), found, strict=True)
    }


def gradient_bound(call: Call, dense: Dense, leaves: dict[str, Tensor]) -> float:
    if not dense.weights.numel():
        return 0.0
    largest = {name: _largest(t) for name, t in leaves.items()}
    size, weight = float(dense.size.max()), float(dense.weights.detach().max())
    width = call.sides.width * (1 + largest["value"])
    number = call.sides.queries * call.sides.keys * max(1, call.sides.flat) * call.sides.heads
    steep = 1 + max([size, *largest.values()])
    if call.score.name.startswith("Cosine"):
        shortest = min(float(leaves[n].detach().norm(dim=-1).min()) for n in ("query", "key"))
        assume(shortest > 1e-2)
    if call.norm.name in ("Sparsemax", "Entmax15"):
        assume(_margin(dense) > 1e-6 and size < 1e3)
    if call.norm.name == "Softpick":
        assume(float(dense.scores.abs().min()) > 1e-6)  # it bends at 0
    bound = 1e3 * unit(call.dtype) * (1 + size) * (1 + weight) * width * number**0.5 * steep
    assume(bound < (1e-3 if call.dtype == torch.float64 else 0.3))
    return bound


def _largest(tensor: Tensor) -> float:
    finite = tensor.detach()[tensor.detach().isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _margin(dense: Dense) -> float:
    """How far the smallest weight above 0 is from it: at a threshold the gradient jumps."""
    weights = dense.weights.detach()
    positive = weights[weights > 0]
    if not positive.numel():
        return 1.0
    # A score that is left out by next to nothing is as bad, and shows as a weight when the row is raised a little.
    return float(positive.min())


def check_dropout(call: Call, drawn: Drawn) -> None:
    """With the identity as values the output is the dropped weights: each is 0 or P / (1 - p)."""
    sides, share = call.sides, drawn.of([0.5, 0.1, 0.9])
    sides = Sides(**{**vars(sides), "width": sides.keys})
    lead = (*sides.batch, sides.groups) if sides.has_heads else sides.batch
    eye = torch.eye(sides.keys, dtype=torch.float64).expand(*lead, sides.keys, sides.keys)
    dtype = torch.float64 if call.dtype == torch.float64 else torch.float32
    call = replace(call, sides=sides, dtype=dtype, vectors={**call.vectors, "value": eye})
    with torch.no_grad():
        dense = call.dense(call.leaves(torch.float64))
    require_reasonable(call, dense)
    size = float(dense.size.max()) if dense.size.numel() else 0.0
    for backend in (None, "tiled", "reference"):
        vectors, given = call.as_given(call.leaves())
        options: dict[str, Any] = {**given, "dropout": share, "backend": backend}
        torch.manual_seed(5)
        output, weights = regard.attention(*vectors, **options, return_weights=True)
        state = torch.get_rng_state()
        torch.manual_seed(5)
        assert torch.equal(regard.attention(*vectors, **options), output), f"{backend}: asking changes dropout"
        assert torch.equal(state, torch.get_rng_state()), f"{backend}: asking changes the random state"
        whole = weights.dense()
        if not whole.isfinite().all():
            continue
        kept = whole / (1 - share)
        tolerance = 64 * unit(dtype) * (1 + size) * (1 + kept.abs())
        is_kept = (output - kept).abs() <= tolerance
        assert (is_kept | (output == 0)).all(), f"{backend}: a dropped weight is neither 0 nor P / (1 - p)"
        large = kept > 1e-4
        count = int(large.sum())
        if count > 400:
            dropped = float((output[large] == 0).double().mean())
            assert abs(dropped - share) < 6 * (share * (1 - share) / count) ** 0.5, f"{backend}: {dropped} dropped"
