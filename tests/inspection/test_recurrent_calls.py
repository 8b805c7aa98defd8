"""Linear recurrences under a watch: the models of transformers that make them by a function, and our own layers."""

import sys
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError, NotSeenError, OverwrittenError, ShapeError
from regard.models import DecoderOnly, DecoderOnlyConfig
from regard.watching import head_table, rollout
from regard.watching.kept.kept_recurrence import Factored, KeptRecurrence, RecurrentRebuilding, Shared
from regard.watching.kept.rebuilding import prove

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
    plain = model(ids).logits
    with regard.watch(model, verify=True) as seen:
        assert torch.equal(model(ids).logits, plain)
    assert vars(sys.modules[type(model).__module__]) == functions  # as they were
    call = next(one for one in seen.calls if one.name == path)
    assert isinstance(call.error, float)
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
    with regard.watch(model) as at_once:
        model(written[:, :-1])
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
    with regard.watch(model) as seen:
        model(tokens(1), None, None, cache)
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
    with regard.watch(model, grad=True) as seen:
        model(tokens(9))
    weights: Any = seen[path]
    weights.received().square().sum().backward()
    assert model.get_parameter(f"{path}.A_log").grad.abs().sum() > 0


@torch.no_grad()
def test_analyses_of_a_hybrid(qwen: tuple[nn.Module, str]) -> None:
    model, path = qwen
    ids = tokens(9)
    with regard.watch(model) as seen:
        model(ids)
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
    with regard.watch(model, keep="summary") as few:
        model(ids)
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
    plain = model(ids)
    with regard.watch(model, verify=True) as seen:
        assert torch.equal(model(ids), plain)
    weights: Any = seen["layers.0.self_attention"]
    assert isinstance(seen.calls[0].error, float)
    assert seen.calls[0].error < 1e-5
    torch.testing.assert_close(weights.dense(), model.attend(ids)["decoder.0"].dense())
    with regard.watch(model) as steps:
        state = model.start(ids[:, :6], torch.tensor([6, 6]))
        for place in (6, 7):
            state = model.step(state, ids[:, place]).state
    torch.testing.assert_close(steps.joined("layers.0.self_attention").dense(), weights.dense()[..., :8, :8])


class Overwriting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        key = x.clone()
        output = regard.linear_attention(x, key, x)
        key.zero_()
        return output


def test_factors_that_are_written_to_later_are_noticed() -> None:
    model, x = Overwriting(), torch.randn(1, 2, 5, 4)
    with regard.watch(model) as seen, torch.no_grad():
        model(x)
    with pytest.raises((OverwrittenError, NotSeenError), match="the keys of"):
        seen["", 0].dense()


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
