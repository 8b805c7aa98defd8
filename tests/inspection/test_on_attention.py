"""`regard.on_attention`: when the function is called, with which arguments; and docs/uses/eviction.md, its user."""

import ast
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.errors import ArgumentError, FunctionError, NotSeenError
from tests import ROOT
from tests.inspection.huggingface_families import LLAMA, Family
from tests.modules import module, parts, watching

LAYERS, PROMPT, NEW, BUDGET, WINDOW = 3, 23, 15, 14, 4


def llama() -> Any:
    settings = {**LLAMA, "num_hidden_layers": LAYERS, "max_position_embeddings": 128}
    return Family("LlamaForCausalLM", settings).build().double()


def prompt() -> Tensor:
    return torch.randint(3, 61, (2, PROMPT), generator=torch.Generator().manual_seed(1))


def hooks_of(model: nn.Module) -> int:
    hooks = [torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks]
    return sum(map(len, hooks)) + sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def nothing(*call: Any) -> None:
    """Look at nothing."""


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "regard"])
def test_outputs_are_the_same_bits(model: Any, implementation: str) -> None:
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

    @parts(lambda name: {"name": name})
    def Block(self: Any, x: Tensor) -> Tensor:
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
    Own = module(lambda m, x: regard.attention(x, x, value=x) if how == "by name" else regard.attention(x, x, x))

    shapes: list[Any] = []
    with regard.on_attention(Own(), lambda name, weights, *vectors: shapes.append([t.shape for t in vectors])) as hook:
        hook.model(torch.randn(1, 2, 3, 4))
    assert shapes == [[(1, 2, 3, 4)] * 3]
    seen = watching(Own())(torch.randn(1, 2, 3, 4))
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


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda *call: 1 / 0, "the function raised ZeroDivisionError: division by zero"),
        (lambda *call: torch.zeros(2, 3), "the function returned a Tensor; expected None.*regard.edit"),
    ],
)
def test_a_mistake_of_the_function_is_named_and_leaves_no_hook(model: Any, function: Any, message: str) -> None:
    model.set_attn_implementation("sdpa")
    hooks = hooks_of(model)
    with torch.no_grad():
        plain = model(prompt()).logits
        with (
            pytest.raises(FunctionError, match=f"'model.layers.0.self_attn': {message}"),
            regard.on_attention(model, function),
        ):
            model(prompt())
        assert hooks_of(model) == hooks
        assert torch.equal(model(prompt()).logits, plain)


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


def test_the_function_runs_without_gradients_and_the_model_with() -> None:
    @parts(lambda: {"scale": nn.Parameter(torch.ones(()))})
    def Block(self: Any, x: Tensor) -> Tensor:
        x = x * self.scale
        return F.scaled_dot_product_attention(x, x, x)

    seen: list[bool] = []
    model = Block()
    with regard.on_attention(model, lambda name, weights, *t: seen.append(weights.received().requires_grad)):
        model(torch.randn(1, 1, 3, 4)).sum().backward()
    assert seen == [False]
    assert model.scale.grad is not None


class Evicting:
    """Eager attention over a cache that is never cut: `alive` has the keys that the rule has not dropped, by layer."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.alive: dict[int, Tensor] = {}

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
        batch, groups, keys, _ = key.shape
        queries, heads, layer = query.shape[2], query.shape[1] // groups, module.layer_idx
        before = self.alive.get(layer, torch.zeros(batch, groups, 0, dtype=torch.bool))
        alive = F.pad(before, (0, keys - before.shape[-1]), value=True)
        seen = torch.arange(keys) <= torch.arange(keys - queries, keys)[:, None]
        seen = seen & alive.repeat_interleave(heads, 1)[:, :, None]
        scores = query @ key.repeat_interleave(heads, 1).mT * more["scaling"]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        self.alive[layer] = self.rule(weights, alive)
        return (weights @ value.repeat_interleave(heads, 1)).transpose(1, 2), weights


def best(scores: Tensor, among: Tensor, count: int) -> Tensor:
    return torch.zeros_like(among).scatter(-1, scores.masked_fill(~among, -torch.inf).topk(count).indices, True)


def token_omission(weights: Tensor, alive: Tensor) -> Tensor:
    scores = weights[:, :, -1].mean(1)[:, None].expand(alive.shape)
    return alive if int(alive[0, 0].sum()) <= BUDGET else best(scores, alive, BUDGET)


def observation(weights: Tensor, alive: Tensor) -> Tensor:
    if weights.shape[-2] == 1:
        return alive
    votes = weights[:, :, -WINDOW:, :-WINDOW].sum(2).unflatten(1, (alive.shape[1], -1)).mean(2)
    pooled = F.avg_pool1d(votes, 7, stride=1, padding=3)
    return F.pad(best(pooled, alive[..., :-WINDOW], BUDGET - WINDOW), (0, WINDOW), value=True)


def definitions_of(page: str) -> dict[str, Any]:
    text = (ROOT / page).read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    wanted = [one for one in ast.parse(text).body if isinstance(one, ast.Import | ast.FunctionDef)]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(list(wanted), []), page, "exec"), names)
    return names


@pytest.mark.parametrize(("method", "rule"), [("tova", token_omission), ("snapkv", observation)])
def test_eviction_is_that_of_the_papers_eager_form(model: Any, method: str, rule: Any) -> None:
    page, more = definitions_of("docs/uses/eviction.md"), {} if method == "tova" else {"window": WINDOW}
    model.set_attn_implementation("sdpa")
    ids, cache = page["greedy"](model, prompt(), NEW, lambda weights: page[method](weights, BUDGET, **more))
    oracle = Evicting(rule)
    transformers.AttentionInterface.register("evicting", oracle)
    model.set_attn_implementation("evicting")
    expected, whole = prompt(), transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for step in range(NEW):
            given = expected if not step else expected[:, -1:]
            logits = model(given, None, None, whole).logits
            expected = torch.cat([expected, logits[:, -1:].argmax(-1)], 1)
    model.set_attn_implementation("sdpa")
    assert torch.equal(ids, expected)
    assert [layer.keys.shape[-2] for layer in cache.layers] == [int(oracle.alive[n][0, 0].sum()) for n in range(LAYERS)]
    for number, layer in enumerate(cache.layers):  # the very keys that the rule has left
        left = oracle.alive[number][..., None].expand(whole.layers[number].keys.shape)
        torch.testing.assert_close(layer.keys.flatten(), whole.layers[number].keys[left], rtol=0, atol=1e-10)
