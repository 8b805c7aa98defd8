"""Linear recurrences under a watch: the models of transformers that make them by a function, and our own layers."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError, ShapeError
from regard.models import DecoderOnly, DecoderOnlyConfig
from regard.watching import head_table, rollout
from regard.watching.kept.kept_recurrence import Factored, KeptRecurrence, RecurrentRebuilding, Shared
from regard.watching.kept.rebuilding import prove
from tests.maps.naive_recurrence import Given, step_by_step
from tests.modules import module, same_bits, watching

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3Next": ("model.layers.0.linear_attn", DELTA | {
        "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16,
    }),
    "KimiLinear": ("model.layers.0.self_attn", {
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 8, "linear_num_heads": 4,
        "linear_head_dim": 8, "num_local_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
        "num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
    }),
    "Bamba": ("model.layers.0.mamba", MAMBA | {"attn_layer_indices": [1]}),
    "MiniMax": ("model.layers.0.self_attn", {
        "head_dim": 8, "block_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"],
    }),
    "Jamba": ("model.layers.0.mamba", {
        "mamba_d_state": 6, "mamba_dt_rank": 4, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    }),
    "FalconH1": ("model.layers.0.mamba", MAMBA | {"mamba_d_ssm": 64, "head_dim": 8}),
}  # fmt: skip


def made(family: str) -> tuple[nn.Module, str]:
    torch.manual_seed(0)
    path, settings = FAMILIES[family]
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES | settings))
    # Weights as they begin make outputs of rounding's size.
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    return model.eval(), path


@pytest.fixture(scope="module")
def qwen() -> tuple[nn.Module, str]:
    return made("Qwen3Next")


def tokens(length: int) -> Tensor:
    return torch.randint(3, 50, (2, length))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_and_a_generation_are_read_and_keep_their_bits(family: str) -> None:
    model, path = made(family)
    functions = dict(vars(sys.modules[type(model).__module__]))
    ids = tokens(37)
    seen = same_bits(model, ids)
    assert vars(sys.modules[type(model).__module__]) == functions  # as they were
    call = next(one for one in seen.calls if one.name == path)
    assert call.error < 1e-5
    assert call.map is not None
    assert bool((call.map.dense() < 0).any())
    report = seen.report()
    assert (report.missed, report.mixers) == ((), ())
    assert f"{path}: {tuple(call.map.shape)}, {report.kinds[path]}, {call.how}, rebuilt to " in str(report)
    assert str(report).count("mask: causal") == len(seen)
    # Single steps go on from the state of the step before: their rows reach back to the first key.
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    prompt = tokens(9)
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    with regard.watch(model, verify=True) as seen:
        assert torch.equal(model.generate(prompt, attention_mask=torch.ones_like(prompt), **options), written)
    assert [seen[key].shape[-2:] for key in seen if key[0] == path] == [
        (9, 9), (1, 10), (1, 11), (1, 12),
    ]  # fmt: skip
    at_once = watching(model)(written[:, :-1])
    whole: Any = at_once[path]
    torch.testing.assert_close(seen.joined(path).dense(), whole.dense(), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_beams_change_places(qwen: tuple[nn.Module, str]) -> None:
    model, path = qwen
    prompt = tokens(6)
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    with regard.watch(model) as seen:
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    chains = [seen[key].source for key in seen if key[0] == path]
    assert [source.keys for source in chains] == [6, 7, 8, 9, 10]
    assert any(
        link.rows is not None for source in chains if isinstance(source, KeptRecurrence) for link in source.chain
    )


@torch.no_grad()
def test_a_state_that_was_not_seen_is_said(qwen: tuple[nn.Module, str]) -> None:
    model, path = qwen
    cache = transformers.DynamicCache(config=model.config)
    model(tokens(5), None, None, cache)
    seen = watching(model)(tokens(1), None, None, cache)
    (call,) = [one for one in seen.calls if one.name == path]
    assert call.map is not None
    assert call.map.shape[-2:] == (1, 1)
    assert "begins with a state of earlier positions" in str(seen.report())


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 5])
def test_statistics_alone_do_not_say_that_a_generation_begins_anew(length: int) -> None:
    model, path = made("Bamba")
    prompt = tokens(length)
    with regard.watch(model, keep="summary") as seen:
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, min_new_tokens=3)
    with pytest.raises(ShapeError, match="nothing is known of its keys by which it could be told"):
        seen.joined(path)


def test_gradients_reach_the_model(qwen: tuple[nn.Module, str]) -> None:
    model, path = qwen
    seen = watching(model, context=nullcontext, grad=True)(tokens(9))
    weights: Any = seen[path]
    weights.received().square().sum().backward()
    assert model.get_parameter(f"{path}.A_log").grad.abs().sum() > 0


@torch.no_grad()
def test_analyses_of_a_hybrid(qwen: tuple[nn.Module, str]) -> None:
    model, path = qwen
    ids = tokens(9)
    seen = watching(model)(ids)
    with pytest.raises(ArgumentError, match='name the rule for them, signs="size"'):
        rollout(seen, -1)
    with_rule = rollout(seen, -1, signs="size")
    torch.testing.assert_close(with_rule.sum(-1), torch.ones(2))
    alone: Any = seen["model.layers.1.self_attn"]
    assert not torch.allclose(with_rule, rollout([alone], -1), atol=1e-3)
    table = head_table(seen)
    assert table.layers == (path, "model.layers.1.self_attn")
    torch.testing.assert_close(table["entropy"][0], seen[path, 0].entropy(of="size").mean((0, 2)))
    assert not seen.audit()
    few = watching(model, keep="summary")(ids)
    kept: Any = few[path]
    assert set(kept.statistics) == {"received", "top_keys", "pooled"}
    asked: list[str] = []
    with regard.on_attention(model, lambda name, *_: asked.append(name)):
        model(ids)
    assert asked == ["model.layers.1.self_attn"]


@torch.no_grad()
@pytest.mark.parametrize("layers", ["gated_delta", "mamba2", "lightning"])
def test_our_own_layers(layers: str) -> None:
    config = DecoderOnlyConfig(dim=16, num_heads=2, num_layers=1, layers=layers)
    model = DecoderOnly(config, vocab_size=11).eval()
    ids = torch.randint(4, 11, (2, 9))
    seen = same_bits(model, ids)
    weights: Any = seen["layers.0.self_attention"]
    assert seen.calls[0].error < 1e-5
    torch.testing.assert_close(weights.dense(), model.attend(ids)["decoder.0"].dense())
    with regard.watch(model) as steps:
        state = model.start(ids[:, :6], torch.tensor([6, 6]))
        for place in (6, 7):
            state = model.step(state, ids[:, place]).state
    torch.testing.assert_close(steps.joined("layers.0.self_attention").dense(), weights.dense()[..., :8, :8])


@pytest.mark.parametrize("finish", [None, lambda rebuilt, count: 2 * rebuilt])
def test_any_row_of_a_recurrence_is_proved(finish: Any) -> None:
    """A late row is rebuilt of one head, and a fault there is found by the rows that are drawn."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 40, 4) for _ in range(3))
    given, shared = Factored(query, key), Shared(3, 1.0, by_delta=False)
    output = (query @ key.mT).tril() @ value * (1 if finish is None else 2)
    right = RecurrentRebuilding(given, shared, value, output, None, finish)
    wrong = RecurrentRebuilding(given, shared, value, output + 9.0 * (torch.arange(40) > 30)[:, None], None, finish)
    choose, faulty = Random(0), 0
    for _ in range(30):
        assert prove(right, choose) is None
        faulty += prove(wrong, choose) is not None
    assert faulty > 5
    assert right.queries == 40
    assert right.some(range(35, 36)).error() < 1e-5


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
    return getattr(sys.modules[getattr(transformers, model).__module__], name)


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
    with home_of(name, KERNELS[name][0]) as layer, regard.watch(layer, verify=True) as seen:
        output = layer(given)
    output = output[0] if isinstance(output, tuple) else output
    torch.testing.assert_close(seen["", 0].dense(), by_time(output), rtol=0, atol=1e-6)
    assert seen.calls[0].error < 1e-5
    assert ("fla's" in str(seen.report())) == (name in FLA)


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
    def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor) -> Any:
        return v, None

    given = dict.fromkeys(("q", "k", "v", "g"), torch.zeros(1, 4, 2, 3))
    with home_of("chunk_gla", chunk_gla) as layer:
        seen = watching(layer)(given | {"cu_seqlens": torch.tensor([0, 2, 4])})
    assert "a function of fla with cu_seqlens= is not read" in str(seen.report())
