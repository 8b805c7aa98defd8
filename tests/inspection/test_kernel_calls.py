"""Kernels of other packages are observed by their public functions. The packages are stand-ins: no card is here."""

import sys
from functools import partial
from inspect import signature
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import NotSeenError
from regard.watching.readers.kernel_arguments import KERNELS, XFORMERS
from tests import ROOT
from tests.inspection import kernel_stand_ins as stand_ins
from tests.inspection.huggingface_families import LLAMA, WINDOWED, built
from tests.modules import module, watching

BOUND = 64 * torch.finfo(torch.float32).eps
"""Sums of at most 20 terms near 1, in two orders, through an exponential."""
ENDS = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
KEY_ENDS = torch.tensor([0, 4, 5, 10], dtype=torch.int32)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.install(monkeypatch)
    torch.manual_seed(0)


Layer = module(lambda m, *args, **kwargs: m.function(*args, **kwargs), lambda function: {"function": function})
"""A model that runs a function."""


FLASH, THREE = "flash_attn", "flash_attn_interface"
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def of(home: str) -> Any:
    return Layer(lambda name, *x, **form: getattr(sys.modules[home], name)(*x, **form))


def watched(home: str, *calls: Call) -> Any:
    model = of(home)
    with torch.no_grad(), regard.watch(model, verify=True) as seen:
        for name, args, form in calls:
            model(name, *args, **form)
    for number in range(len(calls)):
        require_weights(seen, number=number)
    return seen


def vectors(*shape: int, heads: int = 4, groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(*shape, h, 8) for h in (heads, groups, groups))  # type: ignore[return-value]


def of_length(keys: int, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    query, _, _ = vectors(*shape)
    _, key, value = vectors(*shape[:-1], keys)
    return query, key, value


def require_weights(seen: Any, name: str = "", number: int = 0) -> None:
    call = seen.calls[number]
    assert call.error < BOUND
    weights, expected = seen[name, call.index].dense(), stand_ins.CALLS[number]["weights"]
    assert len(weights) == len(expected)
    for found, one in zip(weights, expected, strict=True):
        queries, keys = one.shape[-2:]
        torch.testing.assert_close(found[:, :queries, :keys], one, rtol=0, atol=BOUND)
        assert float(found.sum()) == pytest.approx(float(one.sum()), abs=1e-4)
    lse = seen[name, call.index].lse
    assert lse.shape == weights.shape[:-1]


VARLEN: Any = partial(of(FLASH), "flash_attn_varlen_func")
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.5, "return_attn_probs": True},
    "window": {"window_size": (2, 1), "return_attn_probs": True},
    "window to the left": {"window_size": (1, -1)},
    "causal window with a soft cap": {"causal": True, "window_size": (2, 2), "softcap": 2.0, "return_attn_probs": True},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_batches_and_packed_documents(form: dict[str, Any]) -> None:
    for home in (FLASH, THREE):
        stand_ins.CALLS.clear()
        batches: list[Call] = [("flash_attn_func", of_length(keys, 2, 5), form) for keys in (5, 8, 3)]
        query, key, value = of_length(10, 6)
        name = "flash_attn_varlen_func"
        other: Call = (name, (query, key, value, ENDS, KEY_ENDS, 4, 5), form)
        seen = watched(home, *batches, other, (name, (query, query, query, ENDS, ENDS, 4, 4), form))
        assert seen["", 3].shape == (3, 4, 4, 5)
        assert seen["", 3].received().shape == (3, 4, 5)
        assert "flash_attn_func" in str(seen.report())
        assert "packed documents, each a sequence of the map: 3" in str(seen.report())


@pytest.mark.parametrize("slopes", [(4,), (2, 4)])
def test_slopes_of_alibi(slopes: tuple[int, ...]) -> None:
    ends, given = (torch.tensor([0, 2, 6]), torch.tensor([0, 4, 10])), {"alibi_slopes": torch.rand(slopes)}
    batch: Call = ("flash_attn_func", of_length(7, 2, 5), given | {"causal": True, "softcap": 3.0})
    seen = watched(FLASH, batch, ("flash_attn_varlen_func", (*of_length(10, 6), *ends, 4, 6), given))
    # Selected heads and tiles read the same bias.
    whole = seen["", 1].dense()
    torch.testing.assert_close(seen["", 1][1, 2].dense(), whole[1, 2])
    torch.testing.assert_close(seen["", 1].top_keys(1).values[..., 0], whole.amax(-1))


def test_packed_vectors() -> None:
    query, ends = torch.randn(2, 5, 4, 8), (torch.tensor([0, 2, 5]), torch.tensor([0, 4, 10]))
    watched(
        FLASH,
        ("flash_attn_qkvpacked_func", (torch.randn(2, 5, 3, 4, 8),), {"causal": True}),
        ("flash_attn_kvpacked_func", (query, torch.randn(2, 6, 2, 2, 8)), {}),
        ("flash_attn_varlen_qkvpacked_func", (torch.randn(6, 3, 4, 8), ENDS, 4), {"return_attn_probs": True}),
        ("flash_attn_varlen_kvpacked_func", (query[0], torch.randn(10, 2, 2, 8), *ends, 3, 6), {}),
    )


def test_pages_and_used_positions() -> None:
    pages, ends = torch.randn(2, 5, 4, 2, 8).unbind(), torch.tensor([0, 2, 6])
    form = {"causal": True, "block_table": torch.tensor([[3, 1], [0, 4]], dtype=torch.int32)}
    watched(
        FLASH, ("flash_attn_varlen_func", (torch.randn(6, 4, 8), *pages, ends, torch.tensor([0, 5, 12]), 4, 7), form)
    )
    stand_ins.CALLS.clear()
    form, wide = {"causal": True, "seqused_k": torch.tensor([3, 5])}, torch.tensor([0, 4, 10])
    watched(THREE, ("flash_attn_varlen_func", (*of_length(10, 6), ends, wide, 4, 6), form))


def test_a_cache_that_the_kernel_writes_to() -> None:
    cache, name = torch.zeros(2, 2, 12, 2, 8).unbind(), "flash_attn_with_kvcache"
    steps = [vectors(2, 2) for _ in range(3)]
    before = [torch.tensor([0, 3], dtype=torch.int32) + 2 * n for n in range(3)]
    form: dict[str, Any] = {"causal": True, "return_softmax_lse": True}
    calls: list[Call] = [
        (name, (query, *cache, key, value), form | {"cache_seqlens": counts})
        for (query, key, value), counts in zip(steps, before, strict=True)
    ]
    pages = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32)
    more: list[dict[str, Any]] = [
        {"cache_seqlens": 7, "cache_batch_idx": torch.tensor([1, 1])},
        {"cache_seqlens": torch.tensor([14, 20]), "block_table": pages, "causal": True},
    ]
    seen = watched(FLASH, *calls, *((name, (steps[0][0], *cache), one) for one in more))
    assert [one.shape[-1] for one in seen.maps] == [5, 7, 9, 7, 20]
    seen = watching(of(FLASH))(name, steps[0][0], *cache, rotary_cos=torch.ones(12, 4), rotary_sin=torch.zeros(12, 4))
    with pytest.raises(NotSeenError, match="flash_attn_with_kvcache with rotary_cos= is not read"):
        seen[""]


def test_sinks() -> None:
    query, form = torch.randn(6, 4, 8), {"causal": True, "s_aux": torch.randn(4)}
    batch: Call = ("flash_attn_func", vectors(2, 5), form | {"return_attn_probs": True})
    seen = watched(THREE, batch, ("flash_attn_varlen_func", (query, query, query, ENDS, ENDS, 4, 4), form))
    assert float(seen["", 0].dense().sum(-1).max()) < 1


def test_varlen_attn_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own function, with a stand-in below it for the operator, which has no kernel on a CPU."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    # It leaves with the test: where a kernel is loaded, a watch looks for it in all that is loaded.
    monkeypatch.setitem(sys.modules, varlen.__name__, sys.modules.pop(varlen.__name__))
    if "num_splits" not in signature(varlen.varlen_attn).parameters:
        pytest.skip("an earlier form of the function")

    def kernel(*given: Any) -> tuple[Tensor, ...]:
        *rows, _, _, causal, scale, window = given[:10]
        return *stand_ins.packed(*rows, scale=scale, causal=causal, window=window), torch.zeros(2, dtype=torch.uint64)

    operator: Any = varlen._varlen_attn
    operator.register_kernel("cpu")(kernel)
    query, key, value = of_length(10, 6)
    given, name = (query, key, value, ENDS, KEY_ENDS, 4, 5), "varlen_attn"
    watched(
        "torch.nn.attention.varlen",
        (name, given, {"enable_gqa": True, "return_aux": varlen.AuxRequest(lse=True)}),
        (name, given, {"enable_gqa": True, "window_size": (2, 0), "scale": 0.5}),
        (name, (query, query, query, ENDS, ENDS, 4, 4), {"window_size": (-1, 0)}),
    )


def test_xformers_and_transformer_engine_are_named_as_not_seen() -> None:
    Model = module(
        lambda m, q, k, v: m.engine(q, k, v) + m.layer("memory_efficient_attention", q, k, v),
        lambda: {"engine": stand_ins.DotProductAttention(), "layer": of("xformers.ops")},
    )

    seen = watching(Model())(*vectors(2, 5, groups=4))
    assert len(seen) == 0
    for name, function in (("engine", "DotProductAttention of Tr"), ("layer", "memory_efficient_attention of x")):
        with pytest.raises(NotSeenError, match=f"{function}.* is not read, so that its weights are not seen"):
            seen[name]
        assert function in str(seen.report())


def test_the_page_names_every_function() -> None:
    text = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    flash = {name.replace("qkvpacked_", "").replace("kvpacked_", "") for name in KERNELS.keys() - set(XFORMERS)}
    assert {name for name in flash if name not in text} == set()
    assert "No card has run this page." in text


def test_a_function_is_seen_under_any_name_and_put_back() -> None:
    package: Any = sys.modules["flash_attn"]
    original = package.flash_attn_func
    mine: Any = ModuleType("a_model")
    mine.renamed = original
    sys.modules[mine.__name__] = mine

    def imports(*x: Tensor) -> Tensor:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found]

        mine.taken = flash_attn_func
        return flash_attn_func(*x)

    parts = [Layer(lambda *x: mine.renamed(*x)), Layer(original), Layer(partial(original, causal=True)), Layer(imports)]
    model = nn.ModuleList(parts)
    with torch.no_grad(), regard.watch(model, verify=True) as seen, regard.watch(model) as inner:
        for part in parts:
            part(*vectors(2, 5))
    del sys.modules[mine.__name__]
    assert [call.name for call in seen.calls] == [call.name for call in inner.calls] == ["0", "1", "2", "3"]
    for number in range(4):
        require_weights(seen, str(number), number)
    assert not bool(seen["2"].dense().triu(1).any())
    assert package.flash_attn_func is mine.renamed is mine.taken is parts[1].function is original
    assert isinstance(parts[2].function, partial)


def test_a_kernel_that_is_loaded_under_the_watch_is_a_line_of_the_report() -> None:
    late: Any = ModuleType("late_flash_kernel")

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v

    def loads(x: Tensor) -> Tensor:
        late.flash_attn_func = flash_attn_func
        sys.modules[late.__name__] = late
        return flash_attn_func(x, x, x)

    seen = watching(Layer(loads))(torch.zeros(1, 2, 1, 8))
    del sys.modules[late.__name__]
    assert "flash_attn_func of late_flash_kernel was loaded under the watch, which saw no call of it" in str(
        seen.report()
    )


@pytest.mark.parametrize(
    "given", [{"attention_chunk": 4}, {"qv": torch.zeros(2, 5, 4, 8)}, {"q_descale": torch.ones(2, 2)}]
)
def test_arguments_that_are_not_read_are_named(given: dict[str, Any]) -> None:
    with torch.no_grad(), regard.watch(of(THREE)) as seen:
        output = seen.modules[""]("flash_attn_func", *vectors(2, 5), **given)
    assert output.shape == (2, 5, 4, 8)
    name = next(iter(given))
    with pytest.raises(NotSeenError, match=f"flash_attn_func with {name}= is not read: its effect on the weights"):
        seen[""]
    assert f"flash_attn_func with {name}= is not read" in str(seen.report())


def test_a_kernel_that_computes_another_thing_is_refused_by_its_proof() -> None:
    package: Any = sys.modules["flash_attn"]
    honest = package.flash_attn_varlen_func

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):  # type: ignore[no-untyped-def]
        return 2 * honest(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)

    package.flash_attn_varlen_func = flash_attn_varlen_func
    seen = watching(of(FLASH))("flash_attn_varlen_func", *vectors(6), ENDS, ENDS, 4, 4)
    with pytest.raises(NotSeenError, match="rebuilt wrongly"):
        seen[""]


def test_gradients_reach_packed_vectors_and_bits_stay() -> None:
    model = Layer(VARLEN)
    given = [x.requires_grad_() for x in of_length(10, 6)]
    plain = model(*given, ENDS, KEY_ENDS, 4, 5, causal=True)
    with regard.watch(model, grad=True) as seen:
        output = model(*given, ENDS, KEY_ENDS, 4, 5, causal=True)
    assert torch.equal(output, plain)
    seen[""].entropy().sum().backward()
    gradients = [x.grad for x in given[:2]]
    expected = torch.zeros(())
    for x in given:
        x.grad = None
    for a, b, c, d in zip(ENDS, ENDS[1:], KEY_ENDS, KEY_ENDS[1:], strict=False):
        weights = stand_ins.one(given[0][a:b], given[1][c:d], given[2][c:d], causal=True)[2]
        expected = expected - torch.xlogy(weights, weights.detach().clamp(min=1e-30)).sum()
        expected = expected - (weights - weights.detach()).sum()
    expected.backward()
    for found, x in zip(gradients, given, strict=False):
        torch.testing.assert_close(found, x.grad, rtol=0, atol=2e-6)


def test_values_and_gradients_of_weights() -> None:
    model, given = Layer(VARLEN), [x.requires_grad_() for x in of_length(10, 6)]
    with regard.watch(model, values=True, gradients=True) as seen:
        output = model(*given, ENDS, KEY_ENDS, 4, 5)
    weight = torch.randn_like(output)
    (output * weight).sum().backward()
    found = seen[""].gradient().dense()
    expected = torch.einsum("ihe,jhe->hij", weight[2:6], given[2][5:10].repeat_interleave(2, 1))
    torch.testing.assert_close(found[2], expected, rtol=0, atol=1e-5)


def test_statistics_alone_and_dropout() -> None:
    model, given = Layer(VARLEN), of_length(10, 6)
    with torch.no_grad(), regard.watch(model, keep="summary") as seen, regard.watch(model) as whole:
        model(*given, ENDS, KEY_ENDS, 4, 5)
    torch.testing.assert_close(seen[""].entropy(), whole[""].entropy())
    seen = watching(model, verify=True)(*given, ENDS, KEY_ENDS, 4, 5, dropout_p=0.5)
    assert "not rebuilt: dropout" in str(seen.report())


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    transformers = pytest.importorskip("transformers")
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    if not hasattr(utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX"):
        pytest.skip("an earlier form of the module")
    padding: Any = ModuleType("flash_attn.bert_padding")
    padding.pad_input, padding.unpad_input = utils._pad_input, utils._unpad_input
    monkeypatch.setitem(sys.modules, padding.__name__, padding)
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setitem(utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], "general_availability_check", lambda: True)
    monkeypatch.setattr(transformers.PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn"):
        monkeypatch.setattr(utils, name, None)
    return transformers


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
def test_models_of_transformers(loaded: Any, family: str) -> None:
    model = built(f"{family}ForCausalLM", WINDOWED, "flash_attention_2")
    ids, mask = torch.randint(1, 50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    with torch.no_grad(), regard.watch(model, verify=True) as seen:
        model(ids)
        mask[1, :3] = 0
        model(ids, attention_mask=mask)
    for number, call in enumerate(seen.calls):
        require_weights(seen, call.name, number)
    assert [call.how for call in seen.calls] == ["flash_attn_func"] * 2 + ["flash_attn_varlen_func"] * 2
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = model(ids, output_attentions=True).attentions
        padded = model(ids, attention_mask=mask, output_attentions=True).attentions
    for number in range(2):
        name = f"model.layers.{number}.self_attn"
        torch.testing.assert_close(seen[name, 0].dense(), eager[number], rtol=0, atol=1e-6)
        torch.testing.assert_close(seen[name, 1].dense()[1, :, :6, :6], padded[number][1, :, 3:, 3:], rtol=0, atol=1e-6)


def test_generation_and_documents_of_transformers(loaded: Any) -> None:
    model = built("LlamaForCausalLM", LLAMA | {"num_hidden_layers": 1}, "flash_attention_2")
    ids, name = torch.randint(3, 50, (1, 9)), "model.layers.0.self_attn"
    with torch.no_grad(), regard.watch(model) as seen:
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert seen.joined(name).shape == (1, 4, 12, 12)
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad(), regard.watch(model, verify=True) as seen:
        stand_ins.CALLS.clear()
        model(ids, position_ids=places, use_cache=False)
    require_weights(seen, name)
    assert seen[name].shape == (2, 4, 5, 5)
