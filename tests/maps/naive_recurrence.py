"""A linear recurrence, one position after the other in float64, and random ones."""

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor


class Given(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]


def step_by_step(given: Given, state: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the weights (B, H, T, T) and the last state, from S = diag(w) S - b (a^T S) + beta k v^T."""
    query, key, value = (x.double() for x in given[:3])
    heads = max(x.shape[1] for x in given[:3])
    query, key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (query, key, value))
    length, width, options = query.shape[2], query.shape[3], given.options
    whole = (*query.shape[:2], length)
    decay, beta, removal = (options.get(name) for name in ("decay", "beta", "removal"))
    log = torch.zeros(*whole, 1) if decay is None else decay if decay.dim() == 4 else decay[..., None]
    factor = log.double().exp().expand(*whole, width)
    strength = torch.ones(whole, dtype=torch.double) if beta is None else beta.double().expand(whole)
    a, b = torch.zeros_like(key), torch.zeros_like(key)
    if removal == "delta":
        a, b = factor * key, strength[..., None] * key
    elif removal is not None:
        a, b = (x.double() for x in removal)
    # The values of each position are known by their place, beside the true ones: the same loop gives the weights.
    known = torch.eye(length, dtype=torch.double).expand(*whole[:2], length, length)
    values = torch.cat([value, known], -1)
    start = torch.zeros(*whole[:2], width, values.shape[-1], dtype=torch.double)
    if state is not None:
        start[..., : value.shape[-1]] = state
    outputs, scale = [], options.get("scale", width**-0.5)
    for t in range(length):
        taken = b[:, :, t, :, None] * (a[:, :, t, None] @ start)
        written = strength[:, :, t, None, None] * key[:, :, t, :, None] * values[:, :, t, None]
        start = factor[:, :, t, :, None] * start - taken + written
        outputs.append(scale * (query[:, :, t, None] @ start)[:, :, 0])
    output, weights = torch.stack(outputs, 2).split((value.shape[-1], length), -1)
    return output, weights, start[..., : value.shape[-1]]


LENGTHS = (1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 150)


@st.composite
def recurrences(draw: st.DrawFn, lengths: tuple[int, ...] = LENGTHS) -> Given:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    batch, heads, length = draw(st.integers(0, 2)), draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from(lengths))
    width = draw(st.integers(1, 5))

    def normal(count: int, size: int) -> Tensor:
        return torch.randn(batch, count, length, size, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    groups = [draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0])) for _ in range(2)]
    query, value = normal(heads, width), normal(groups[0], draw(st.integers(1, 3)))
    key = torch.nn.functional.normalize(normal(groups[1], width), dim=-1)
    options: dict[str, Any] = {}
    kind = draw(st.sampled_from(("none", "head", "channel", "constant", "closed", "open", "mixed")))
    shape = {"channel": (batch, heads, length, width), "constant": (1, heads, 1)}.get(kind, (batch, heads, length))
    factor = {"closed": -1e4, "open": -1e-6}.get(kind, -2.0)
    if kind != "none":
        options["decay"] = factor * uniform(*shape)
    if kind == "mixed":  # Some gates close altogether.
        options["decay"] = torch.where(uniform(*shape) < 0.2, -torch.inf, options["decay"])
    strength = draw(st.sampled_from(("none", "any", "zero", "one", "two")))
    if strength != "none":
        options["beta"] = {"any": uniform, "zero": torch.zeros, "one": torch.ones, "two": torch.ones}[strength](
            batch, heads, length
        ).double() * (2 if strength == "two" else 1)
    removal = draw(st.sampled_from(("none", "delta", "pair")))
    if removal == "delta":
        options["removal"] = "delta"
    if removal == "pair":
        whole = key.repeat_interleave(heads // key.shape[1], 1)
        options["removal"] = (whole * 0.5, whole * uniform(batch, heads, length, 1))
        if "decay" in options:  # (diag(w) - b a^T stays a contraction)
            options["removal"] = (options["removal"][0] * 0.5, options["removal"][1])
    return Given(query, key, value, options)
