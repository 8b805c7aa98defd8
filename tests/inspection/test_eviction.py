"""The methods of docs/uses/eviction.md against eager attention that masks what papers drop, over whole generations."""

import ast
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import regard
from regard.errors import FunctionError
from tests import ROOT
from tests.inspection import eager_eviction as eager

BUDGET, RECENT, WINDOW, LAYERS, PROMPT, NEW = 14, 5, 4, 3, 23, 15


def definitions_of(page: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The imports, classes and functions of a page's script, and how many lines each function or class has."""
    text = (ROOT / page).read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    wanted: list[ast.stmt] = [node for node in ast.parse(text).body if isinstance(node, kinds)]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(wanted, []), page, "exec"), names)
    return names, {
        node.name: node.end_lineno - node.lineno + 1
        for node in wanted
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.end_lineno is not None
    }


PAGE, LINES = definitions_of("docs/uses/eviction.md")


def llama(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    config: Any
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=61, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=128, initializer_range=0.3
        )
        return transformers.GPT2LMHeadModel(config).eval().double()
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().double()


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


def prompt(batch: int = 2) -> Tensor:
    return torch.randint(3, 61, (batch, PROMPT), generator=torch.Generator().manual_seed(1))


def generate(model: Any, ids: Tensor, **more: Any) -> Any:
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "min_new_tokens": NEW, **more}
    return model.generate(
        ids, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True, **settings
    )


METHODS = {
    "H2O": (lambda: PAGE["H2O"](BUDGET, RECENT), lambda: eager.heavy_hitters(BUDGET, RECENT)),
    "TOVA": (lambda: PAGE["tova"](BUDGET), lambda: eager.token_omission(BUDGET)),
    "SnapKV": (
        lambda: PAGE["snapkv"](BUDGET, WINDOW, width=5),
        lambda: eager.observation(lambda layer: BUDGET, WINDOW, 5, F.avg_pool1d),
    ),
    "SnapKV, maxima": (
        lambda: PAGE["snapkv"](BUDGET, WINDOW, width=3, pool=F.max_pool1d),
        lambda: eager.observation(lambda layer: BUDGET, WINDOW, 3, F.max_pool1d),
    ),
    "PyramidKV": (
        lambda: PAGE["pyramidkv"](BUDGET, WINDOW, LAYERS),
        lambda: eager.observation(eager.pyramid_budget(LAYERS, BUDGET, WINDOW, PROMPT), WINDOW, 7, F.avg_pool1d),
    ),
}


def held(cache: Any) -> list[int]:
    return [layer.keys.shape[-2] for layer in cache.layers]


@pytest.mark.parametrize("implementation", ["sdpa", "regard"])
@pytest.mark.parametrize("method", METHODS)
def test_a_generation_is_that_of_the_papers_eager_form(model: Any, method: str, implementation: str) -> None:
    ours, theirs = METHODS[method]
    oracle = eager.use(model, theirs())
    expected = generate(model, prompt())
    model.set_attn_implementation("sdpa")
    enabled = regard.huggingface.enable(model) if implementation == "regard" else None
    try:
        with regard.on_attention(model, ours()) as hook:
            found = generate(model, prompt())
    finally:
        if enabled is not None:
            enabled.disable()
    assert hook.calls == LAYERS * NEW
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)  # generate() hands out float32
    assert held(found.past_key_values) == [int(oracle.alive[n][0, 0].sum()) for n in range(LAYERS)]
    assert sum(held(found.past_key_values)) < LAYERS * (PROMPT + NEW - 1)


def test_each_method_is_shorter_than_twenty_lines() -> None:
    assert all(LINES[name] < 20 for name in ("H2O", "tova", "snapkv", "pyramidkv"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_under_flex_attention() -> None:
    model = llama().float()
    function = METHODS["PyramidKV"][0]
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        logits = []
        for implementation in ("sdpa", "flex_attention"):
            model.set_attn_implementation(implementation)
            cache = transformers.DynamicCache(config=model.config)
            with regard.on_attention(model, function()):
                out = [model(part, past_key_values=cache).logits for part in (prompt(), prompt()[:, :1])]
            assert held(cache) == [24, 15, 6]
            logits.append(torch.cat(out, 1))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


def steps(model: Any, ids: Tensor, function: Any, sizes: list[int], **more: Any) -> tuple[Tensor, Any]:
    """The logits of a text that is fed in pieces, without positions."""
    cache = transformers.DynamicCache(config=model.config)
    found, start = [], 0
    with torch.no_grad(), regard.on_attention(model, function):
        for size in sizes:
            found.append(model(ids[:, start : start + size], past_key_values=cache, **more).logits)
            start += size
    return torch.cat(found, 1), cache


@pytest.mark.parametrize("method", ["TOVA", "PyramidKV"])
@pytest.mark.parametrize("implementation", ["sdpa", "regard"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_new_tokens_stand_behind_all_that_were_seen(kind: str, implementation: str, method: str) -> None:
    """One or several at a time, without positions from the caller, layers of one length or of several."""
    model, sizes = llama(kind), [PROMPT, 1, 3, 1, 2]
    ids = torch.randint(3, 61, (2, sum(sizes)), generator=torch.Generator().manual_seed(2))
    ours, rule = METHODS[method][0](), METHODS[method][1]()

    def function(name: str, weights: Any, *vectors: Any) -> Any:
        # PyramidKV drops after the prompt alone.
        return ours(name, weights, *vectors) if method == "TOVA" or weights.shape[-1] == PROMPT else None

    enabled = regard.huggingface.enable(model) if implementation == "regard" else None
    found, cache = steps(model, ids, function, sizes)
    if enabled is not None:
        enabled.disable()
    eager.use(model, lambda n, w, alive: rule(n, w, alive) if method == "TOVA" or w.shape[-1] == PROMPT else alive)
    expected, _ = steps(model, ids, lambda *call: None, sizes)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert sum(held(cache)) < LAYERS * sum(sizes)


@pytest.mark.parametrize("implementation", ["sdpa", "regard"])
def test_a_batch_that_is_padded_on_the_left(model: Any, implementation: str) -> None:
    ids, mask = prompt(), torch.ones(2, PROMPT, dtype=torch.long)
    ids[1, :6], mask[1, :6] = 0, 0
    oracle = eager.use(model, eager.token_omission(BUDGET))
    oracle.real = mask.bool()
    expected = generate(model, ids, attention_mask=mask)
    model.set_attn_implementation("sdpa")
    enabled = regard.huggingface.enable(model) if implementation == "regard" else None
    with regard.on_attention(model, PAGE["tova"](BUDGET)):
        found = generate(model, ids, attention_mask=mask)
    if enabled is not None:
        enabled.disable()
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)  # generate() hands out float32
    before = hooks_of(model)
    with pytest.raises(FunctionError, match="keep at most 17 keys here"), regard.on_attention(model, PAGE["tova"](18)):
        generate(model, ids, attention_mask=mask)
    assert hooks_of(model) == before


def hooks_of(model: Any) -> int:
    """How many hooks there are."""
    modules = [*model.modules(), torch.nn.modules.module]
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules[:-1]) + len(
        torch.nn.modules.module._global_forward_hooks
    )


def test_beams(model: Any) -> None:
    """Beams change rows, and a cut cache is put into their order like any other."""
    model.set_attn_implementation("sdpa")
    plain = generate(model, prompt(), num_beams=3)
    with regard.on_attention(model, PAGE["tova"](PROMPT + NEW)):
        assert torch.equal(generate(model, prompt(), num_beams=3).sequences, plain.sequences)
    eager.use(model, eager.observation(lambda layer: BUDGET, WINDOW, 5, F.avg_pool1d))
    model.set_attn_implementation("sdpa")
    with regard.on_attention(model, PAGE["snapkv"](BUDGET, WINDOW, width=5)):
        found = generate(model, prompt(1), num_beams=3)
    assert held(found.past_key_values) == [BUDGET + NEW - 1] * LAYERS


def test_a_second_turn(model: Any) -> None:
    """generate() goes on with a cut cache if it is given the new tokens and a mask of all."""
    model.set_attn_implementation("sdpa")
    ids, cache = prompt(1), transformers.DynamicCache(config=model.config)
    more = torch.randint(3, 61, (1, 4), generator=torch.Generator().manual_seed(3))
    with regard.on_attention(model, PAGE["snapkv"](BUDGET, WINDOW, width=5)) as hook:
        first = generate(model, ids, past_key_values=cache).sequences
        seen = hook.seen(cache)
        assert seen == PROMPT + NEW - 1
        whole = torch.cat([first, more], 1)
        with pytest.raises(FunctionError, match=f"{PROMPT - BUDGET} tokens came again"):
            generate(model, whole, past_key_values=cache)
        assert (hook.seen(cache), held(cache)) == (seen, [BUDGET + NEW - 1] * LAYERS)
        new = whole[:, seen:]
        out = model.generate(
            new, attention_mask=torch.ones_like(whole), past_key_values=cache, max_new_tokens=1, output_logits=True,
            return_dict_in_generate=True, do_sample=False, pad_token_id=0,
        )  # fmt: skip
    rule = eager.observation(lambda layer: BUDGET, WINDOW, 5, F.avg_pool1d)
    eager.use(model, lambda layer, w, alive: rule(layer, w, alive) if w.shape[-1] == PROMPT else alive)
    expected, _ = steps(model, whole, lambda *call: None, [PROMPT, *[1] * (NEW - 1), len(new[0])])
    torch.testing.assert_close(out.logits[0].double(), expected[:, -1], rtol=0, atol=1e-6)
