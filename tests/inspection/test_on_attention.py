"""The hook itself: when the function is called and with what, and that a model and its cache survive every mistake."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard import KeepKeys, KeepTokens
from regard.errors import ArgumentError, FunctionError, NotSeenError
from tests.inspection.test_eviction import LAYERS, PROMPT, held, hooks_of, llama, prompt


def nothing(*call: Any) -> None:
    """Hand nothing back."""


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "regard"])
def test_outputs_are_the_same_bits_if_nothing_is_handed_back(model: Any, implementation: str) -> None:
    model.set_attn_implementation("sdpa" if implementation == "regard" else implementation)
    enabled = regard.huggingface.enable(model) if implementation == "regard" else None
    names, shapes = [], set()

    def function(name: str, weights: regard.AttentionMap, *vectors: Tensor | None) -> None:
        names.append(name)
        shapes.add((tuple(weights.shape), *(None if t is None else tuple(t.shape) for t in vectors)))

    with torch.no_grad():
        plain = model(prompt(), use_cache=False).logits
        with regard.on_attention(model, function, "model.layers.*.self_attn") as hook:
            found = model(prompt(), use_cache=False).logits
    if enabled is not None:
        enabled.disable()
    assert torch.equal(found, plain)
    assert names == [f"model.layers.{n}.self_attn" for n in range(LAYERS)]
    weights, query, key, value = (2, 4, 23, 23), (2, 4, 23, 8), (2, 2, 23, 8), (2, 2, 23, 8)
    assert shapes == {
        (weights, None, None, (2, 4, 23, 8)) if implementation == "eager" else (weights, query, key, value)
    }
    assert (hook.calls, hook.missed) == (LAYERS, [])
    assert repr(hook) == "AttentionHook(LlamaForCausalLM, closed, 3 calls)"


def test_the_function_is_called_before_the_next_layer_runs_and_after_its_own_call() -> None:
    events: list[str] = []

    class Block(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            events.append(f"{self.name} begins")
            y = F.scaled_dot_product_attention(x, x, x)
            events.append(f"{self.name} goes on")
            return y

    model, x = nn.Sequential(Block("a"), Block("b")), torch.randn(1, 2, 3, 4)
    with regard.on_attention(model, lambda name, *call: events.append(f"called for {name}")):
        model(x)
    assert events == ["a begins", "called for 0", "a goes on", "b begins", "called for 1", "b goes on"]


def test_maps_and_vectors_are_those_of_the_call() -> None:
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 5, 8)
    seen = []

    def function(name: str, weights: regard.AttentionMap, query: Any, key: Any, value: Any) -> None:
        seen.append((weights.dense(), (query @ key.mT / 2).softmax(-1), (weights @ value).transpose(1, 2).flatten(2)))

    with torch.no_grad(), regard.on_attention(model, function):
        output, expected = model(x, x, x, average_attn_weights=False)
    ((dense, by_hand, mixed),) = seen
    torch.testing.assert_close(dense, expected)
    torch.testing.assert_close(by_hand, expected)
    torch.testing.assert_close(model.out_proj(mixed), output)


@pytest.mark.parametrize("how", ["by place", "by name"])
def test_regard_attention_by_place_and_by_name(how: str) -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return regard.attention(x, x, value=x) if how == "by name" else regard.attention(x, x, x)

    shapes: list[Any] = []
    with regard.on_attention(Own(), lambda name, weights, *vectors: shapes.append([t.shape for t in vectors])) as hook:
        hook.model(torch.randn(1, 2, 3, 4))
    assert shapes == [[(1, 2, 3, 4)] * 3]
    with regard.watch(Own()) as seen:
        seen.modules[""](torch.randn(1, 2, 3, 4))
    assert len(seen) == 1


def test_a_watch_around_the_door_sees_the_same(model: Any) -> None:
    model.set_attn_implementation("sdpa")
    found: list[Tensor] = []
    with (
        torch.no_grad(),
        regard.watch(model) as seen,
        regard.on_attention(model, lambda n, w, *t: found.append(w.dense())),
    ):
        model(prompt())
    for one, other in zip(seen.maps, found, strict=True):
        torch.testing.assert_close(one.dense(), other)


# -- mistakes ---------------------------------------------------------------------------------------------

INT = torch.int64
WRONG = {
    "raises": (lambda *call: 1 / 0, "the function raised ZeroDivisionError: division by zero"),
    "a tensor": (lambda *call: torch.zeros(2, 3), r"handed back Tensor \(2, 3\); expected None, regard.KeepKeys"),
    "out of range": (lambda *call: KeepKeys(torch.tensor([[0, 24], [1, 2]])), r"indices in \[0, 24\), got 24"),
    "negative": (lambda *call: KeepKeys(torch.tensor([[0, -1], [1, 2]])), r"indices in \[0, 24\), got -1"),
    "twice": (lambda *call: KeepKeys(torch.tensor([[0, 1], [2, 2]])), "index 2 twice in one row"),
    "floats": (lambda *call: KeepKeys(torch.zeros(2, 3)), "tensor of int64, got torch.float32"),
    "bools": (lambda *call: KeepKeys(torch.ones(2, 24, dtype=torch.bool)), "tensor of int64, got torch.bool"),
    "query heads": (
        lambda *call: KeepKeys(torch.arange(3).expand(2, 4, 3)),
        r"indices \(2, K\) or \(2, 2, K\), K in \[1, 24\] here, got \(2, 4, 3\)",
    ),
    "one row": (lambda *call: KeepKeys(torch.arange(3)), r"got \(3,\)"),
    "nothing left": (lambda *call: KeepKeys(torch.zeros(2, 0, dtype=INT)), r"got \(2, 0\)"),
    "too many": (lambda *call: KeepKeys(torch.arange(25).expand(2, 25)), r"got \(2, 25\)"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_in_a_later_layer_leaves_the_cache_as_it_was(model: Any, mistake: str) -> None:
    model.set_attn_implementation("sdpa")
    wrong, message = WRONG[mistake]
    hooks, cache = hooks_of(model), transformers.DynamicCache(config=model.config)

    def function(name: str, *call: Any) -> Any:
        # The first layer is cut before the second makes its mistake, and the third never runs.
        return KeepKeys(torch.arange(5).expand(2, 5)) if name == "model.layers.0.self_attn" else wrong(name, *call)

    with torch.no_grad():
        model(prompt(), past_key_values=cache)
        layers: list[Any] = cache.layers
        before = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
        plain = model(prompt()[:, :1], past_key_values=copy_of(cache, model)).logits
        with pytest.raises(FunctionError, match=message) as raised, regard.on_attention(model, function) as hook:
            model(prompt()[:, :1], past_key_values=cache)
        assert "'model.layers.1.self_attn'" in str(raised.value)
        for layer, (keys, values) in zip(layers, before, strict=True):
            assert torch.equal(layer.keys, keys)
            assert torch.equal(layer.values, values)
        assert (hooks_of(model), hook.seen(cache)) == (hooks, PROMPT)
        assert torch.equal(model(prompt()[:, :1], past_key_values=cache).logits, plain)
        # An empty cache is empty again.
        empty = transformers.DynamicCache(config=model.config)
        with pytest.raises(FunctionError), regard.on_attention(model, function):
            model(prompt(), past_key_values=empty)
        assert empty.get_seq_length() == 0


def copy_of(cache: Any, model: Any) -> Any:
    other = transformers.DynamicCache(config=model.config)
    for n, layer in enumerate(cache.layers):
        other.update(layer.keys.clone(), layer.values.clone(), n)
    return other


def keep_five(name: str, weights: regard.AttentionMap, *vectors: Any) -> KeepKeys:
    return KeepKeys(torch.arange(5).expand(weights.shape[0], 5))


def mistral() -> tuple[Any, dict[str, Any]]:
    config = transformers.MistralConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config).eval(), {"input_ids": prompt()}


def t5() -> tuple[Any, dict[str, Any]]:
    config: Any = transformers.T5Config  # (its type does not know a setting of generation)
    config = config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config).eval(), {
        "input_ids": prompt(), "decoder_input_ids": prompt()
    }  # fmt: skip


def bart() -> tuple[Any, dict[str, Any]]:
    config = transformers.BartConfig(
        vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
    )  # fmt: skip
    inputs = {"input_ids": prompt(), "decoder_input_ids": prompt()}
    return transformers.BartForConditionalGeneration(config).eval(), inputs


def with_cache(**settings: Any) -> tuple[Any, dict[str, Any]]:
    model = llama().float()
    kind = settings.pop("kind")
    if kind == "static":
        cache: Any = transformers.StaticCache(config=model.config, max_cache_len=64)
    elif kind == "quantised":
        cache = transformers.QuantizedCache("fp8", model.config)
    elif kind == "none":
        return model, {"input_ids": prompt(), "use_cache": False}
    else:
        model.set_attn_implementation("eager")
        cache = transformers.DynamicCache(config=model.config)
    return model, {"input_ids": prompt(), "past_key_values": cache}


UNCUT = {
    "sliding": (mistral, None, "has DynamicSlidingWindowLayer as its cache, which cannot be cut"),
    "static": (lambda: with_cache(kind="static"), None, "has StaticLayer as its cache, which cannot be cut"),
    "quantised": (lambda: with_cache(kind="quantised"), None, "has Fp8QuantizedLayer as its cache"),
    "none": (lambda: with_cache(kind="none"), None, "is given no cache of transformers.*use_cache=True"),
    "eager": (lambda: with_cache(kind="eager"), None, "writes its attention out.*attn_implementation='sdpa'"),
    "bias": (t5, "decoder.block.*.layer.0", "adds a bias to its scores, by the place of each key"),
    "cross": (bart, "model.decoder.layers.*.encoder_attn", "attends to an encoder"),
    "encoder": (bart, "model.encoder", "is given no cache"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", UNCUT)
def test_a_cache_that_cannot_be_cut_is_refused(kind: str) -> None:
    torch.manual_seed(0)
    make, names, message = UNCUT[kind]
    model, inputs = make()
    hooks = hooks_of(model)
    with torch.no_grad(), pytest.raises(FunctionError, match=message), regard.on_attention(model, keep_five, names):
        model(**inputs)
    assert hooks_of(model) == hooks
    cache = inputs.get("past_key_values")
    if cache is not None:
        assert int(cache.get_seq_length()) == 0


def test_the_self_attention_of_a_decoder_is_cut() -> None:
    torch.manual_seed(0)
    model, inputs = bart()
    with torch.no_grad(), regard.on_attention(model, keep_five, "model.decoder.layers.*.self_attn"):
        cache = model(**inputs).past_key_values
    assert held(cache.self_attention_cache) == [5, 5]
    assert held(cache.cross_attention_cache) == [PROMPT, PROMPT]


def test_a_model_without_attention() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(NotSeenError, match="no attention call of it was seen"), regard.on_attention(model, nothing):
        model(torch.zeros(1, 2))
    with regard.on_attention(model, nothing):
        pass  # it never ran


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_refused_at_the_door(model: Any) -> None:
    with pytest.raises(ArgumentError, match=r"takes a torch.nn.Module, got int"):
        regard.on_attention(3, nothing)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="takes a function, got int"):
        regard.on_attention(model, 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="no module of the model is named 'modle'"):
        regard.on_attention(model, nothing, "modle")
    with regard.on_attention(model, nothing) as hook, pytest.raises(ArgumentError, match="open already"):
        hook.__enter__()


def test_an_error_of_the_model_leaves_nothing_behind() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("broken")

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]

    model, x = nn.Sequential(Block(), Block(), Broken()), torch.randn(1, 4, 8)
    hooks = hooks_of(model)
    one = torch.tensor([[1]])
    with pytest.raises(ValueError, match="broken"), regard.on_attention(model, lambda *c: KeepTokens(one), "0"):
        model(x)
    assert hooks_of(model) == hooks
    assert model[:2](x).shape == x.shape


def test_the_function_runs_without_gradients_and_the_model_with() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            return F.scaled_dot_product_attention(x, x, x)

    seen: list[bool] = []
    model = Block()
    with regard.on_attention(model, lambda name, weights, *t: seen.append(weights.received().requires_grad)):
        model(torch.randn(1, 1, 3, 4)).sum().backward()
    assert seen == [False]
    assert model.scale.grad is not None
