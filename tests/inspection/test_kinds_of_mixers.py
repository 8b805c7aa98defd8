"""Every module that mixes tokens has its kind, and the analyses take the layers that they are about."""

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.errors import NotKeptError, NotSeenError
from regard.watching import compare, head_table, relevance, rollout
from regard.watching.readers.channel_calls import Convolution
from regard.watching.report import beside_attention
from tests.families.architectures import inputs_for, tiny
from tests.inspection.test_recurrent_calls import home_of
from tests.modules import module, same_bits, watching

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def watched(key: str, **settings: Any) -> tuple[Any, nn.Module, dict[str, Any]]:
    model = tiny(key)
    inputs = inputs_for(key, model)
    seen = watching(model, **settings)(**inputs)
    return seen, model, inputs


def test_a_layer_that_is_a_convolution_has_a_map() -> None:
    seen, _, _ = watched("lfm3", verify=True)
    assert seen.report().kinds == {
        "layers.0.conv": "convolution", "layers.1.self_attn": "attention", "layers.2.self_attn": "attention",
    }  # fmt: skip
    call = seen.calls[0]
    assert call.error < 1e-6
    weights = seen["layers.0.conv", 0]
    assert isinstance(weights.source, Convolution)
    dense, filters = weights.dense(), seen.modules["layers.0.conv"].conv.weight[:, 0]
    for back in range(8):
        expected = filters[:, -1 - back] if back < filters.shape[-1] else torch.zeros(len(filters))
        assert torch.equal(dense.diagonal(-back, -2, -1), expected[None, :, None].expand(2, -1, 11 - back))
    assert not dense.triu(1).any()
    x = torch.randn(*dense.shape[:-1], 3)
    torch.testing.assert_close(weights @ x, dense @ x)
    torch.testing.assert_close(weights.mT @ x, dense.mT @ x)
    torch.testing.assert_close(weights.received(), dense.sum(-2))
    torch.testing.assert_close(weights[1, 5].dense(), dense[1, 5])
    assert str(seen.report()).count("mask: window of 7") == 1
    assert rollout(seen, -1, signs="size").shape == (2, 11)
    with pytest.raises(regard.RegardError, match="none"):
        weights.lse  # noqa: B018


@torch.no_grad()
def test_a_convolution_in_a_generation() -> None:
    """Its single steps get the last positions from a state, and their rows are the filters."""
    model = tiny("lfm2", "Lfm2ForCausalLM", layer_types=["conv", "full_attention"])
    ids = torch.randint(3, 50, (2, 9))
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    seen = same_bits(model.generate, ids, of=model, attention_mask=torch.ones_like(ids), **options)
    assert (seen.report().missed, seen.report().mixers) == ((), ())
    path = next(path for path, kind in seen.report().kinds.items() if kind == "convolution")
    calls = [call for call in seen.calls if call.name == path]
    assert all(isinstance(call.error, float) and call.error < 1e-6 for call in calls)
    filters = seen.modules[path].conv.weight[:, 0]
    prefill, *steps = seen.calls_of(path)
    assert prefill.shape[-2:] == (9, 9)
    assert len(steps) == 3
    for step in steps:
        row = step.dense()[:, :, 0]
        assert step.shape[-2] == 1
        assert torch.equal(row[..., -filters.shape[-1] :], filters.expand(2, -1, -1))
        assert not row[..., : -filters.shape[-1]].any()


def test_attention_over_depth_and_convolutions_beside_attention_are_no_layers() -> None:
    seen, _, _ = watched("inkling2_text")
    kinds = seen.report().kinds
    assert kinds["layers.1.attention_input"] == "attention over depth"
    of_keys = next(path for path in kinds if path.startswith("layers.0.self_attn.k_"))  # The next release renames it.
    assert kinds[of_keys] == kinds["layers.0.post_mlp_convolution"] == "convolution"
    assert str(seen["final_input", 0].dimensions) == "(batch, window, query: slots, key: layers)"
    assert str(seen["layers.1.self_attn", 0].dimensions) == "(batch, head, query, key)"  # of the depth's outputs
    assert "attention over depth (queries: slots, keys: layers), " in str(seen.report())
    with pytest.raises(NotSeenError, match=re.escape(f"{of_keys}: a convolution within layers.0.self_attn")):
        rollout(seen, -1)
    deep: Any = SimpleNamespace(calls=[
        SimpleNamespace(name=name, kind=kind, is_of_positions=True)
        for name, kind in (("layer.keys.filter", "convolution"), ("layer", "attention"))
    ])  # fmt: skip
    assert list(beside_attention(deep)) == ["layer.keys.filter"]
    skip = [path for path, kind in kinds.items() if kind == "convolution"]
    assert rollout(seen, -1, skip=skip).shape == (2, 11)
    assert set(head_table(seen, skip=skip).layers) == {"layers.0.self_attn", "layers.1.self_attn"}
    assert not seen.audit(skip=skip, causal=True)


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ((query @ key.mT) * 0.5).softmax(-1) @ value


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, by_hand])
@pytest.mark.parametrize("kind", ["attention over depth", "attention"])
def test_the_keys_of_learned_queries_are_layers_of_each_position_or_heads(attend: Any, kind: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        heads = m.project(x).unflatten(-1, (3, 4)).transpose(1, 2)
        states = heads if kind == "attention" else torch.stack([x, x.sin(), x.tanh()], -2)
        return attend(m.query.expand(2, 3, 2, 4), states, states)

    model = module(forward, lambda: {"query": nn.Parameter(torch.randn(2, 4)), "project": nn.Linear(4, 12)})()
    seen = watching(model)(torch.randn(2, 3, 4))
    assert seen.report().kinds[""].removeprefix("cross-") == kind
    assert "mask: none" in str(seen.report())
    keys = torch.randn(2, 3, 5, 4)
    seen = watching(module(lambda m, x: attend(model.query.expand(2, 3, 2, 4), x, x))())(keys)
    assert seen.report().kinds[""] == "attention"


def test_streams_and_cross_attention_have_their_kinds() -> None:
    seen, _, _ = watched("lxmert")
    assert (len(seen), seen.report().missed) == (12, ())
    kinds = watched("deepseek_v4")[0].report().kinds
    assert kinds["layers.0"] == "mixture of streams"
    seen, _, _ = watched("t5")
    kinds = seen.report().kinds
    assert kinds["decoder.block.0.layer.1.EncDecAttention"] == "cross-attention"
    assert kinds["decoder.block.0.layer.0.SelfAttention"] == "attention"
    table = head_table(seen)
    of_cross = table.layers.index("decoder.block.0.layer.1.EncDecAttention")
    assert table["self"][of_cross].isnan().all()
    assert table["entropy"][of_cross].isfinite().all()


def test_an_indexer_is_named_with_its_recall() -> None:
    model = tiny("deepseek_v32")
    ids = torch.randint(3, 50, (1, 24))
    seen = watching(model)(ids)
    assert "4 of the causal keys for each query, chosen by layers.0.self_attn.indexer; " in str(seen.report())
    (finding,) = [one for one in seen.audit() if one.path == "layers.0.self_attn"]
    call = seen.calls[0].factors.call
    scores = (call.query @ call.key.mT).double() * call.score.dot_scale(call.query.shape[-1])
    causal = torch.ones(24, 24).tril().bool()
    dense, sparse = scores.masked_fill(~causal, -torch.inf).softmax(-1), seen["layers.0.self_attn", 0].dense()
    chosen = (sparse > 0).any(1, keepdim=True)
    recall = float((dense * chosen).sum(-1)[..., 4:].mean())
    assert f"recall: they have {recall:.1%} of the dense map's weight" in str(seen.report())
    lost = ~chosen[..., 0].expand(1, 4, 24)
    lost[..., :4] = False
    assert finding.reason == "first key dropped"
    assert finding.numbers["rows"] == pytest.approx(float(lost[..., 4:].double().mean()))
    assert finding.numbers["weight"] == pytest.approx(float(dense[..., 0][lost].mean()), rel=1e-4)


def test_a_choice_of_all_first_keys_is_no_finding() -> None:
    class Chosen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            index = (x @ x.mT).masked_fill(~torch.ones(9, 9).tril().bool(), -1e4)
            index[..., 0] = 1e4
            best = index.topk(3).indices
            mask = torch.zeros(1, 9, 9, dtype=torch.bool).scatter(-1, best, True) & torch.ones(9, 9).tril().bool()
            return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], mask[:, None])

    model = Chosen()
    seen = watching(model)(torch.randn(1, 9, 4))
    assert "3 of the causal keys for each query, chosen by the model itself; " in str(seen.report())
    assert not seen.audit()


def test_mamba_against_its_hidden_attention() -> None:
    """Ali et al. 2024 (arXiv:2403.01590), equation 11: C_t (prod of exp(dt A)) dt_j B_j, for each channel."""
    mamba = sys.modules[transformers.MambaModel.__module__]
    batch, channels, length, states = 2, 3, 9, 4
    x, dt, z = torch.randn(3, batch, channels, length, dtype=torch.float64).unbind()
    inner = {name: torch.randn(batch, states, length, dtype=torch.float64) for name in "BC"}
    rates, skip = -torch.rand(channels, states, dtype=torch.float64), torch.randn(channels, dtype=torch.float64)
    given = {"hidden_states": x, "dt": dt, "A": rates, "D": skip, "z": z, "delta_softplus": True, **inner}
    with home_of("mamba_selective_scan", mamba.mamba_selective_scan) as scan, regard.watch(scan, verify=True) as seen:
        scan({**given, "return_last_state": True})
    step, weights = nn.functional.softplus(dt), torch.zeros(batch, channels, length, length, dtype=torch.float64)
    for t in range(length):
        for j in range(t + 1):
            passed = (step[..., j + 1 : t + 1].sum(-1)[..., None] * rates).exp()
            weights[..., t, j] = (inner["C"][:, None, :, t] * passed * inner["B"][:, None, :, j]).sum(-1) * step[..., j]
    torch.testing.assert_close(seen["", 0].dense().double(), weights, rtol=0, atol=1e-12)
    assert seen.report().kinds == {"": "state space"}
    assert isinstance(seen.calls[0].error, float)
    some = seen["", 0]
    torch.testing.assert_close(some[0, 2].dense(), some.dense()[0, 2])  # one channel, without the others


def test_several_scans_of_one_module_are_no_layers() -> None:
    mamba = sys.modules[transformers.MambaModel.__module__]
    home: Any = ModuleType("home_of_scans")
    home.mamba_selective_scan, sys.modules[home.__name__] = mamba.mamba_selective_scan, home

    class Scans(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rates, inner = -torch.ones(4, 2), torch.ones(1, 2, 5)
            halves = x.chunk(2, 1)
            return torch.cat([home.mamba_selective_scan(one, one.abs(), rates, inner, inner) for one in halves], 1)

    Scans.__module__ = home.__name__
    seen = watching(Scans())(torch.rand(1, 8, 5))
    del sys.modules[home.__name__]
    assert len(seen) == 0
    assert "one of several recurrences of a module" in str(seen.report())


ANALYSES: dict[str, Any] = {
    "rollout": lambda seen, skip: rollout(seen, -1, skip=skip, signs="size"),
    "head_table": lambda seen, skip: head_table(seen, skip=skip),
    "compare": lambda seen, skip: compare(seen, seen, skip=skip),
    "relevance": lambda seen, skip: relevance(seen, skip=skip),
    "audit": lambda seen, skip: seen.audit(skip=skip, causal=True),
}


@pytest.fixture(scope="module")
def kinds_seen() -> dict[str, Any]:
    return {"depth": watched("inkling2_text")[0], "cross": watched("t5")[0], "streams": watched("deepseek_v4")[0]}


@pytest.mark.parametrize("kind", ["depth", "cross", "streams"])
@pytest.mark.parametrize("analysis", ANALYSES)
def test_an_analysis_over_layers_takes_no_other_mixtures_for_them(
    kinds_seen: dict[str, Any], analysis: str, kind: str
) -> None:
    seen, ask = kinds_seen[kind], ANALYSES[analysis]
    kinds = seen.report().kinds
    skip = [path for path, own in kinds.items() if own == "convolution"]
    refused = {
        ("rollout", "cross"): "sequence: hand over those",
        ("relevance", "streams"): "no rule for blocks of tokens",
    }
    if reason := refused.get((analysis, kind)):
        with pytest.raises(regard.RegardError, match=reason):
            ask(seen, skip)
        return
    found = ask(seen, skip)
    left_out = {path for path, own in kinds.items() if own in ("attention over depth", "mixture of streams")}
    if analysis == "audit":
        assert not left_out & {finding.path for finding in found}
        return
    if analysis == "rollout":
        alone = [seen.over_tokens(path, 0) for path, own in kinds.items() if own == "attention"]
        assert torch.equal(found, rollout(alone, -1))
        return
    if analysis == "relevance":
        layers = [step.map for steps in found._layers for step in steps]
        assert len(layers) == sum(own in ("attention", "cross-attention") for own in kinds.values())
        said = repr(found)
    else:
        assert set(found.layers) == {path for path, own in kinds.items() if own in ("attention", "cross-attention")}
        said = str(found)
    if kind == "depth":
        assert all(path in said for path in left_out)  # It says so.


def test_an_alignment_is_of_another_sequence(kinds_seen: dict[str, Any]) -> None:
    for kind in ("depth", "streams"):
        with pytest.raises(NotSeenError, match="attends from one sequence to another"):
            kinds_seen[kind].alignment()


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_part_of_a_recall(side: str) -> None:
    model = tiny("deepseek_v32")
    keep = torch.ones(2, 24, dtype=torch.long)
    keep[1, :9] = 0
    keep = keep if side == "left" else keep.flip(-1)
    seen = watching(model)(torch.randint(3, 50, (2, 24)), attention_mask=keep)
    call = seen.calls[0].factors.call
    scores = (call.query @ call.key.mT).double() * call.score.dot_scale(call.query.shape[-1])
    visible = torch.ones(24, 24).tril().bool() & keep[:, None, None].bool()
    dense, chosen = scores.masked_fill(~visible, -torch.inf).softmax(-1), seen[seen.calls[0].name, 0].dense() > 0
    choosing = (keep.cumsum(-1) > 4) & keep.bool()
    recall = float((dense * chosen).sum(-1).mean(1)[choosing].mean())
    assert f"recall: they have {recall:.1%} of the dense map's weight" in str(seen.report())
    first = keep.argmax(-1)
    lost = ~chosen.any(1).gather(-1, first[:, None, None].expand(2, 24, 1))[..., 0] & choosing
    found = [one for one in seen.audit() if one.reason == "first key dropped" and one.path == seen.calls[0].name]
    assert [one.numbers["rows"] for one in found] == [pytest.approx(float(lost.sum() / choosing.sum()))]


LENGTH = 30
HEAVY, SPARSE = "layers.0.self_attn", "layers.1.self_attn"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    return tiny("deepseek_v4", index_topk=2, compress_rates=rates)


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(3, 120, (2, length), generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="module")
def run(model: nn.Module) -> tuple[Any, dict[str, Tensor]]:
    inputs: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, given, path=path: inputs.__setitem__(path, given[0]))
        for path, module in model.named_modules() if path.endswith(("compressor.kv_proj", "compressor.kv_norm"))
    ]  # fmt: skip
    seen = same_bits(model, tokens())
    for hook in hooks:
        hook.remove()
    return seen, inputs


def shares_of(compressor: Any, x: Tensor) -> Tensor:
    """The dense shares (B, D, n, T) by the formula, one block and one token after the other."""
    gate, rate, width = compressor.gate_proj(x), compressor.compress_rate, compressor.head_dim
    blocks, overlaps = x.shape[1] // rate, gate.shape[-1] > width
    scores = x.new_full((len(x), width, blocks, x.shape[1]), -torch.inf)
    for block in range(blocks):
        for place in range(rate):
            own = gate[:, block * rate + place] + compressor.position_bias[place]
            scores[:, :, block, block * rate + place] = own[:, width:] if overlaps else own
            if overlaps and block + 1 < blocks:
                scores[:, :, block + 1, block * rate + place] = own[:, :width]
    return scores.softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize("path", [HEAVY, SPARSE])
def test_the_compressor_has_a_map_for_each_channel(model: nn.Module, run: Any, path: str) -> None:
    seen, inputs = run
    weights, compressor = seen[f"{path}.compressor", 0], model.get_submodule(f"{path}.compressor")
    x = inputs[f"{path}.compressor.kv_proj"]
    expected = shares_of(compressor, x)
    torch.testing.assert_close(weights.dense(), expected, rtol=0, atol=1e-6)
    assert str(weights.dimensions) == "(batch, head, query: blocks, key)"
    made = inputs[f"{path}.compressor.kv_norm"]  # the sums, before their norm and rotation
    value: Any = compressor.kv_proj(x).unflatten(-1, (-1, compressor.head_dim))  # (B, T, series, D)
    own = torch.arange(LENGTH) // compressor.compress_rate == torch.arange(made.shape[1])[:, None]
    of_series = [expected * ~own, expected * own] if value.shape[2] > 1 else [expected]
    summed = sum(torch.einsum("bdwt,btd->bwd", one, value[:, :, number]) for number, one in enumerate(of_series))
    torch.testing.assert_close(summed, made, rtol=0, atol=1e-5)
    assert next(one for one in seen.calls if one.name == f"{path}.compressor").error < 1e-5
    some = torch.randn(*expected.shape[:2], LENGTH, 3)
    torch.testing.assert_close(weights @ some, expected @ some, rtol=0, atol=1e-5)
    back = torch.randn(*expected.shape[:3], 3)
    torch.testing.assert_close(weights.mT @ back, expected.mT @ back, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("path", [HEAVY, SPARSE])
def test_blocks_lead_back_to_tokens(model: nn.Module, run: Any, path: str) -> None:
    seen, inputs = run
    assert str(seen[path, 0].dimensions) == "(batch, head, query, key: positions and blocks)"
    compressor = model.get_submodule(f"{path}.compressor")
    weights, blocks = seen[path, 0].dense(), shares_of(compressor, inputs[f"{path}.compressor.kv_proj"])
    expected = weights[..., :LENGTH] + weights[..., LENGTH:] @ blocks.mean(1, keepdim=True)
    found = seen.over_tokens(path)
    assert str(found.dimensions) == "(batch, head, query, key)"
    torch.testing.assert_close(found.dense(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(found[1, 2, 9], expected[1, 2, 9], rtol=0, atol=1e-6)
    x = torch.randn(2, 4, LENGTH, 3)
    torch.testing.assert_close(found @ x, expected @ x, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.mT @ x, expected.mT @ x, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.received(), expected.sum(-2), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.sum(-1), weights.sum(-1), rtol=0, atol=1e-5)  # no weight is lost
    assert not expected.triu(1).any()


def test_the_report_names_blocks_and_their_choice(run: Any) -> None:
    seen, _ = run
    report = seen.report()
    assert report.kinds[f"{SPARSE}.compressor"] == "compression"
    assert report.kinds[SPARSE] == "attention"
    assert report.missed == report.mixers == ()
    assert "(keys: positions and blocks)" in str(report)
    assert "; 3 blocks of 8 tokens, with " in str(report)
    assert f"2 of the earlier ones for each query, chosen by {SPARSE}.compressor.indexer" in str(report)
    assert "compressor: a softmax over" not in str(report)
    assert not seen.audit(causal=True)


@torch.no_grad()
def test_the_recall_of_chosen_blocks() -> None:
    model = tiny("deepseek_v4", index_topk=2)
    regard.huggingface.enable(model)
    with regard.watch(model) as seen:
        model(tokens())
    call = seen.calls[-1].factors.call
    scores = (call.query @ call.key.mT).double()[..., LENGTH:] * call.score.dot_scale(call.query.shape[-1])
    ready = (torch.arange(LENGTH) + 1) // 4
    dense = scores.masked_fill(torch.arange(7) >= ready[:, None], -torch.inf).softmax(-1)
    chosen = seen[SPARSE, 0].dense()[..., LENGTH:] > 0
    recall = float((dense * chosen).sum(-1)[..., ready > 2].mean())
    assert 0.2 < recall < 0.99
    assert f"compressor.indexer, with {recall:.1%} of the weight that all would get" in str(seen.report())
    assert rollout(seen, -1).shape == (2, LENGTH)


@torch.no_grad()
def test_steps_with_a_cache_say_that_blocks_are_not_led_back(model: nn.Module) -> None:
    with regard.watch(model) as seen:
        cache = model(tokens(), use_cache=True).past_key_values
        model(tokens(1), past_key_values=cache)
    assert seen.over_tokens(SPARSE, 0).shape[-1] == LENGTH
    assert "its cache has tokens of earlier calls" in str(seen.report())
    with pytest.raises(NotKeptError, match="last 7 keys are blocks of 4 tokens, and the shares of these"):
        seen.over_tokens(SPARSE)
    with pytest.raises(NotSeenError, match="blocks of 4 tokens"):
        head_table(seen)
