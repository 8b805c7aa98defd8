"""Recurrences by the functions of transformers, and by stand-ins for those of fla, which is not installed here."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from tests.maps.naive_recurrence import Given, step_by_step
from tests.modules import module

transformers = pytest.importorskip("transformers")


@contextmanager
def home_of(name: str, function: Callable[..., Any]) -> Iterator[nn.Module]:
    """A layer beside a function of that name, which it calls with the tensors that it is given."""
    home: Any = ModuleType(f"home_of_{name}")
    sys.modules[home.__name__] = home

    def stand_in(**given: Any) -> Any:
        return function(**given)

    stand_in.__name__, stand_in.__signature__ = name, signature(function)  # type: ignore[attr-defined]
    setattr(home, name, stand_in)

    Layer = module(lambda m, given: getattr(home, name)(**given))

    Layer.__module__ = home.__name__
    try:
        yield Layer()
    finally:
        del sys.modules[home.__name__]


def naive(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """fla's functions by the formula, (B, T, H, D): the output and the last state."""
    heads_first = Given(by_time(q), by_time(k), by_time(v), options)
    output, _, state = step_by_step(heads_first)
    return output.transpose(1, 2).to(q.dtype), state.to(q.dtype)


def by_time(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def lightning(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int) -> tuple[Tensor, Tensor]:
    slopes = 8 / q.shape[2] * (1 - layer_idx / num_layers) * torch.arange(q.shape[2], dtype=q.dtype)
    return naive(q, k, v, decay=-slopes[None, :, None])


FLA: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "chunk_gla": (lambda q, k, v, g: naive(q, k, v, decay=by_time(g)), ("g",)),
    "fused_recurrent_gated_delta_rule": (
        lambda q, k, v, g, beta: naive(q, k, v, decay=by_time(g), beta=by_time(beta), removal="delta"),
        ("g of heads", "beta"),
    ),
    "chunk_kda": (
        lambda q, k, v, g, beta: naive(q, k, v, decay=by_time(g), beta=by_time(beta), removal="delta"), ("g", "beta"),
    ),
    "chunk_delta_rule": (lambda q, k, v, beta: naive(q, k, v, beta=by_time(beta), removal="delta"), ("beta",)),
    "chunk_simple_gla": (
        lambda q, k, v, g, g_gamma: naive(q, k, v, decay=by_time(g + g_gamma)), ("g of heads", "g_gamma"),
    ),
    "fused_recurrent_simple_gla": (
        lambda q, k, v, g_gamma: naive(q, k, v, decay=g_gamma[None, :, None]), ("g_gamma",),
    ),
    "chunk_retention": (
        lambda q, k, v: naive(q, k, v, decay=torch.log(1 - 2 ** (-5 - torch.arange(3.0)))[None, :, None]), (),
    ),
    "fused_recurrent_lightning_attn": (lightning, ("layer_idx", "num_layers")),
    "chunk_rwkv7": (
        lambda r, w, k, v, a, b: naive(r, k, v, decay=by_time(w), removal=(-by_time(a), by_time(b)), scale=1.0),
        ("w", "a", "b"),
    ),
}  # fmt: skip


def of_transformers(model: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(sys.modules[getattr(transformers, model).__module__], name)
    return found


def delta_rule(model: str, name: str) -> Callable[..., Any]:
    function = of_transformers(model, name)

    def run(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Any:
        return function(query, key, value, g, beta, initial_state=None, output_final_state=False)

    return run


KERNELS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    name: (delta_rule(model, name), (gate, "beta")) for model, name, gate in (
        ("Qwen3NextModel", "torch_chunk_gated_delta_rule", "g of heads"),
        ("Qwen3NextModel", "torch_recurrent_gated_delta_rule", "g of heads"),
        ("KimiLinearModel", "chunk_kimi_delta_attention", "g"),
        ("KimiLinearModel", "recurrent_kimi_delta_attention", "g"),
    )
} | {"mamba2_chunk_scan": (of_transformers("Mamba2Model", "mamba2_chunk_scan"), ())} | FLA  # fmt: skip


def given_for(name: str, length: int, values: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(0)

    def numbers(*last: int) -> Tensor:
        return torch.randn(2, length, 3, *last, generator=generator, dtype=dtype)

    query, key = (nn.functional.normalize(numbers(4), dim=-1) for _ in range(2))
    values = numbers(5) if values is None else values.to(dtype)
    if name.startswith("mamba2"):
        decays = -torch.rand(3, generator=generator, dtype=dtype)
        return {"hidden_states": values, "dt": numbers().sigmoid(), "A": decays, "B": key, "C": query, "chunk_size": 16}
    made = {
        "g": -numbers(4).abs(), "g of heads": -numbers().abs(), "beta": numbers().sigmoid(), "w": -numbers(4).abs(),
        "a": -key, "b": key * numbers(4).sigmoid(), "layer_idx": 1, "num_layers": 4,
        "g_gamma": -torch.rand(3, generator=generator, dtype=dtype),
    }  # fmt: skip
    names = ("query", "key", "value") if name in KERNELS.keys() - FLA.keys() else ("q", "k", "v")
    names = ("r", *names[1:]) if name.endswith("rwkv7") else names
    vectors = dict(zip(names, (query, key, values), strict=True))
    return vectors | {one.partition(" of ")[0]: made[one] for one in KERNELS[name][1]}


@torch.no_grad()
@pytest.mark.parametrize("name", KERNELS)
def test_the_map_is_the_output_for_the_identity_as_values(name: str) -> None:
    """By the function itself, or by the formula: all columns of P at once."""
    length = 40
    values = torch.eye(length)[None, :, None].expand(2, -1, 3, -1)
    given = given_for(name, length, values)
    with home_of(name, KERNELS[name][0]) as layer, regard.watch(layer) as seen:
        output = layer(given)
    output = output[0] if isinstance(output, tuple) else output
    torch.testing.assert_close(seen["", 0].dense(), by_time(output), rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", FLA)
def test_functions_of_fla_by_their_names(name: str) -> None:
    given = given_for(name, 7)
    with home_of(name, FLA[name][0]) as layer, regard.watch(layer, verify=True) as seen:
        output = layer(given)[0]
    assert isinstance(seen.calls[0].error, float), seen.calls[0].notes
    assert seen.calls[0].error < 1e-5
    torch.testing.assert_close(seen["", 0] @ by_time(given["v"]), by_time(output), rtol=0, atol=1e-5)
    assert "fla's" in str(seen.report())


BAD: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "a decay above 0": ("chunk_gla", lambda given: {"g": -given["g"]}, "decay must be at most 0, got values from 0"),
    "a beta above 2": (
        "chunk_delta_rule", lambda given: {"beta": given["beta"] + 2}, r"beta must be in .0, 2. with removal=.delta.",
    ),
    "a rate above 0": ("mamba2_chunk_scan", lambda given: {"A": -given["A"]}, "decay must be at most 0, got values"),
    "a key of nan": ("chunk_retention", lambda given: {"k": given["k"] * torch.nan}, "key must be finite, got values"),
    "a gate of nan": (
        "torch_chunk_gated_delta_rule", lambda given: {"g": given["g"] * torch.nan}, "decay must be finite, got values",
    ),
    "a removal of inf": ("chunk_rwkv7", lambda given: {"b": given["b"] * torch.inf}, "b of removal must be finite"),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("what", BAD)
def test_factors_out_of_their_range_are_said(what: str) -> None:
    name, change, said = BAD[what]
    given = given_for(name, 7)
    with home_of(name, KERNELS[name][0]) as layer, regard.watch(layer) as seen:
        layer(given | change(given))
    (line,) = [one for one in str(seen.report()).splitlines() if re.search(said, one)]
    assert line.count("must be") == 1
    (finding,) = seen.audit()
    assert finding.reason == "recurrence"
    assert finding.severity == "error"
    assert re.search(said, finding.says)
    with home_of(name, KERNELS[name][0]) as layer, regard.watch(layer) as seen:
        layer(given)
    assert "must be" not in str(seen.report())
    assert not seen.audit()


@torch.no_grad()
@pytest.mark.parametrize("factor", ["g", "beta"])
def test_unlike_lengths_are_refused_in_a_sentence(factor: str) -> None:
    def broadcasts(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        return v, None

    given = given_for("chunk_kda", 7)
    with home_of("chunk_kda", broadcasts) as layer, regard.watch(layer) as seen:
        layer(given | {factor: given[factor][:, :3]})
    assert seen.maps == []
    ((_, reason),) = seen.report().missed
    counts = {"g": "3 decays, 7 write strengths", "beta": "7 decays, 3 write strengths"}[factor]
    assert reason == f"ShapeError: the factors of one recurrence have unlike lengths: 7 queries, 7 keys, {counts}"


def test_packed_sequences_of_fla_are_refused_by_name() -> None:
    home: Any = ModuleType("fla_packed")
    sys.modules[home.__name__] = home

    def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor | None = None) -> Any:
        return v, None

    home.chunk_gla = chunk_gla

    Layer = module(lambda m, x: home.chunk_gla(x, x, x, x, cu_seqlens=torch.tensor([0, 2, 4])))

    Layer.__module__ = home.__name__
    with torch.no_grad(), regard.watch(Layer()) as seen:
        seen.modules[""](torch.zeros(1, 4, 2, 3))
    del sys.modules[home.__name__]
    assert "a function of fla with cu_seqlens= is not read" in str(seen.report())
    assert home.chunk_gla is chunk_gla
