"""Every module that mixes tokens has its kind, and the analyses take the layers that they are about."""

import sys
from inspect import signature
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import NotSeenError, ShapeError
from regard.maps.sources.convolution import Convolution
from regard.watching import head_table, rollout
from regard.watching.hooks.module_hooks import RECURRENCES
from regard.watching.readers.recurrent_calls import CONVOLUTIONS, READERS
from tests.maps.naive_recurrence import Given, step_by_step

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def watched(key: str, **settings: Any) -> tuple[Any, nn.Module, dict[str, Any]]:
    from tests.families import architectures as made

    model = made.build(getattr(made.library(), made.architectures()[key]), made.tiny_config(key))
    inputs = made.inputs_for(key, model)
    with torch.no_grad(), regard.watch(model, **settings) as seen:
        model(**inputs)
    return seen, model, inputs


def test_a_layer_that_is_a_convolution_has_a_map() -> None:
    seen, _, _ = watched("lfm3", verify=True)
    assert seen.report().kinds == {
        "layers.0.conv": "convolution", "layers.1.self_attn": "attention", "layers.2.self_attn": "attention",
    }  # fmt: skip
    call = seen.calls[0]
    assert isinstance(call.error, float)
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


def test_attention_over_depth_and_convolutions_beside_attention_are_no_layers() -> None:
    seen, _, _ = watched("inkling2_text")
    kinds = seen.report().kinds
    assert kinds["layers.1.attention_input"] == "attention over depth"
    assert kinds["layers.0.self_attn.k_sconv"] == kinds["layers.0.post_mlp_convolution"] == "convolution"
    assert str(seen["final_input", 0].dimensions) == "(batch, head, query: slots, key: layers)"
    assert "attention over depth (queries: slots, keys: layers), F.scaled" in str(seen.report())
    with pytest.raises(NotSeenError, match=r"layers.0.self_attn.k_sconv: a convolution within layers.0.self_attn"):
        rollout(seen, -1)
    skip = [path for path, kind in kinds.items() if kind == "convolution"]
    assert rollout(seen, -1, skip=skip).shape == (2, 11)
    assert set(head_table(seen, skip=skip).layers) == {"layers.0.self_attn", "layers.1.self_attn"}
    assert seen.audit(skip=skip, causal=True) == []


def test_streams_and_cross_attention_have_their_kinds() -> None:
    kinds = watched("deepseek_v4")[0].report().kinds
    assert kinds["layers.0"] == "mixture of streams"
    seen, _, _ = watched("t5")
    kinds = seen.report().kinds
    assert kinds["decoder.block.0.layer.1.EncDecAttention"] == "cross-attention"
    assert kinds["decoder.block.0.layer.0.SelfAttention"] == "attention"
    with pytest.raises(ShapeError, match="got attention to another sequence"):
        rollout(seen, -1)
    table = head_table(seen)
    of_cross = table.layers.index("decoder.block.0.layer.1.EncDecAttention")
    assert table["self"][of_cross].isnan().all()
    assert table["entropy"][of_cross].isfinite().all()


def test_an_indexer_is_named_with_its_recall() -> None:
    from tests.families import architectures as made

    model: Any = made.build(transformers.DeepseekV32Model, made.tiny_config("deepseek_v32"))
    ids = torch.randint(3, 50, (1, 24))
    with torch.no_grad(), regard.watch(model) as seen:
        model(ids)
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
            output: Tensor = nn.functional.scaled_dot_product_attention(
                x[:, None], x[:, None], x[:, None], mask[:, None]
            )
            return output

    model = Chosen()
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.randn(1, 9, 4))
    assert "3 of the causal keys for each query, chosen by " in str(seen.report())
    assert seen.audit() == []


def test_mamba_against_its_hidden_attention() -> None:
    """Ali et al. 2024 (arXiv:2403.01590), equation 11: C_t (prod of exp(dt A)) dt_j B_j, for each channel."""
    mamba = sys.modules[transformers.MambaModel.__module__]

    home: Any = ModuleType("home_of_scan")
    home.mamba_selective_scan, sys.modules[home.__name__] = mamba.mamba_selective_scan, home

    class Scan(nn.Module):
        def forward(self, **given: Tensor) -> Any:
            return home.mamba_selective_scan(**given, return_last_state=True)

    Scan.__module__ = home.__name__
    batch, channels, length, states = 2, 3, 9, 4
    x, dt, z = torch.randn(3, batch, channels, length, dtype=torch.float64).unbind()
    inner = {name: torch.randn(batch, states, length, dtype=torch.float64) for name in "BC"}
    rates, skip = -torch.rand(channels, states, dtype=torch.float64), torch.randn(channels, dtype=torch.float64)
    with regard.watch(Scan(), verify=True) as seen:
        seen.modules[""](hidden_states=x, dt=dt, A=rates, D=skip, z=z, delta_softplus=True, **inner)
    del sys.modules[home.__name__]
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
    with regard.watch(Scans()) as seen:
        seen.modules[""](torch.rand(1, 8, 5))
    del sys.modules[home.__name__]
    assert len(seen) == 0
    assert "one of several recurrences of a module" in str(seen.report())


def test_every_function_that_is_replaced_has_a_reader() -> None:
    assert {*RECURRENCES, "forward"} == {*READERS, *CONVOLUTIONS}


@torch.no_grad()
def test_the_map_is_the_output_for_the_identity_as_values() -> None:
    """By the families' own functions: all columns of P at once."""
    home, length = sys.modules[transformers.Qwen3NextModel.__module__], 64

    class Layer(nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return home.torch_chunk_gated_delta_rule(*given, use_qk_l2norm_in_kernel=True)[0]

    Layer.__module__ = home.__name__
    q, k = torch.randn(2, 2, length, 3, 8).unbind()
    gates = torch.rand(2, 2, length, 3)
    values = torch.eye(length)[None, :, None].expand(2, -1, 3, -1)
    with regard.watch(Layer()) as seen:
        output = seen.modules[""](q, k, values, -gates[0], gates[1])
    torch.testing.assert_close(seen["", 0].dense(), output.transpose(1, 2), rtol=0, atol=1e-6)


def naive(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """fla's functions by the formula, (B, T, H, D): the output and the last state."""
    heads_first = Given(by_time(q), by_time(k), by_time(v), options)
    output, _, state = step_by_step(heads_first)
    return output.transpose(1, 2).to(q.dtype), state.to(q.dtype)


def by_time(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


FLA: dict[str, tuple[Any, tuple[str, ...]]] = {
    "chunk_gla": (lambda q, k, v, g: naive(q, k, v, decay=by_time(g)), ("g",)),
    "fused_recurrent_gated_delta_rule": (
        lambda q, k, v, g, beta: naive(q, k, v, decay=by_time(g[..., 0]), beta=by_time(beta), removal="delta"),
        ("g", "beta"),
    ),
    "chunk_delta_rule": (lambda q, k, v, beta: naive(q, k, v, beta=by_time(beta), removal="delta"), ("beta",)),
    "chunk_retention": (
        lambda q, k, v: naive(q, k, v, decay=torch.log(1 - 2 ** (-5 - torch.arange(3.0)))[None, :, None]), (),
    ),
    "chunk_rwkv7": (
        lambda r, w, k, v, a, b: naive(r, k, v, decay=by_time(w), removal=(-by_time(a), by_time(b)), scale=1.0),
        ("w", "a", "b"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FLA)
def test_functions_of_fla_by_their_names(name: str) -> None:
    function, more = FLA[name]
    home: Any = ModuleType(f"fla_{name}")
    sys.modules[home.__name__] = home

    def stand_in(**given: Any) -> Any:
        return function(**given)

    stand_in.__name__, stand_in.__signature__ = name, signature(function)  # type: ignore[attr-defined]
    setattr(home, name, stand_in)

    class Layer(nn.Module):
        def forward(self, given: dict[str, Tensor]) -> Any:
            return getattr(home, name)(**given)

    Layer.__module__ = home.__name__
    generator = torch.Generator().manual_seed(0)

    def numbers(*last: int) -> Tensor:
        return torch.randn(2, 7, 3, *last, generator=generator)

    key = nn.functional.normalize(numbers(4), dim=-1)
    made = {"g": -numbers(1 if "delta" in name else 4).abs(), "beta": numbers().sigmoid(), "w": -numbers(4).abs(),
            "a": -key, "b": key * numbers(4).sigmoid()}  # fmt: skip
    first = "r" if name.endswith("rwkv7") else "q"
    given = {first: numbers(4), "k": key, "v": numbers(5), **{one: made[one] for one in more}}
    with torch.no_grad(), regard.watch(Layer(), verify=True) as seen:
        output = seen.modules[""](given)[0]
    del sys.modules[home.__name__]
    assert isinstance(seen.calls[0].error, float), seen.calls[0].notes
    assert seen.calls[0].error < 1e-5
    torch.testing.assert_close(seen["", 0] @ by_time(given["v"]), by_time(output), rtol=0, atol=1e-5)
    assert "fla's" in str(seen.report())


def test_packed_sequences_of_fla_are_refused_by_name() -> None:
    home: Any = ModuleType("fla_packed")
    sys.modules[home.__name__] = home

    def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor | None = None) -> Any:
        return v, None

    home.chunk_gla = chunk_gla

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return home.chunk_gla(x, x, x, x, cu_seqlens=torch.tensor([0, 2, 4]))

    Layer.__module__ = home.__name__
    with torch.no_grad(), regard.watch(Layer()) as seen:
        seen.modules[""](torch.zeros(1, 4, 2, 3))
    del sys.modules[home.__name__]
    assert "a function of fla with cu_seqlens= is not read" in str(seen.report())
    assert home.chunk_gla is chunk_gla
