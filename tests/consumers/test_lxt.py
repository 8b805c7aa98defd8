"""lxt has the rules of AttnLRP for whole models: inside of attention they are those of `regard.watching.attn_lrp`.

Its rules have no epsilon; ours has one with the sign of the output. They are compared in float64 with an epsilon that
does not matter. For vision transformers lxt has another rule inside of attention, CP-LRP, which gives queries and keys
nothing: there its values get twice what ours give them.
"""

import importlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import regard
from regard.watching import attn_lrp

pytest.importorskip("lxt", reason="lxt is in an environment of its own: make consumers ONLY=lxt")
# Where torchvision's own operators do not load (a CUDA build beside the CPU build of torch), it cannot be imported,
# because it registers rules for these two. lxt takes one model from it, which needs none of them.
OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for operator in ("nms", "qnms"):
    with suppress(RuntimeError):
        OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
transformers = pytest.importorskip("transformers")
lxt = pytest.importorskip("lxt.efficient")

TINY = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = {**TINY, "num_key_value_heads": 2, "max_position_embeddings": 64}
CAUSAL_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
    "gemma3": ("Gemma3ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}
"""Models in which transformers looks up its function of attention, where lxt puts its own."""
EPSILON = 1e-14

Attend = Callable[..., tuple[Tensor, Any]]


@cache
def patched(name: str) -> Any:
    """The module of transformers that a model is in, patched by lxt, once in a process."""
    code = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    lxt.monkey_patch(code)
    return code


def made(name: str, kind: str, **sizes: Any) -> Any:
    patched(name)
    torch.manual_seed(0)
    cls = getattr(patched(name), kind)
    return cls._from_config(cls.config_class(**sizes), attn_implementation="sdpa").eval().double()


def tokens() -> Tensor:
    return torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(1))


def relevance_of(tensor: Tensor) -> Tensor:
    """Relevance as lxt defines it: the tensor times its gradient."""
    assert tensor.grad is not None
    return (tensor * tensor.grad).detach()


def of_key_heads(relevance: Tensor, heads: int) -> Tensor:
    """The sums over the query heads (B, H, S, D) that share a key head."""
    return relevance.unflatten(1, (heads, -1)).sum(2)


def recorded(attend: Attend, found: list[tuple[Tensor, ...]]) -> Attend:

    def attended(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, second = attend(module, query, key, value, *args, **kwargs)
        found.append((query, key, value, output))
        for one in found[-1]:
            one.retain_grad()
        return output, second

    return attended


@pytest.mark.parametrize("name", CAUSAL_MODELS)
def test_each_layer_of_a_model_that_lxt_patches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name, CAUSAL_MODELS[name][0], **CAUSAL_MODELS[name][1])
    layers: list[tuple[Tensor, ...]] = []
    functions = patched(name).ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions, "sdpa", recorded(functions["sdpa"], layers))
    with regard.watch(model, values=True) as seen:
        logits = model(tokens(), use_cache=False).logits
    logits[:, -1].max(-1).values.sum().backward()
    assert len(layers) == len(seen) == 2
    for (query, key, value, output), weights in zip(layers, seen.maps, strict=True):
        found = attn_lrp(weights, relevance_of(output).transpose(1, 2), epsilon=EPSILON)
        heads = key.shape[1]
        for mine, theirs in (
            (found.query, relevance_of(query)),
            (of_key_heads(found.key, heads), relevance_of(key)),
            (of_key_heads(found.value, heads), relevance_of(value)),
        ):
            assert float(theirs.abs().max()) > 1e-9
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9 * float(theirs.abs().max()))


def test_the_layers_of_bert_which_lxt_writes_anew() -> None:
    model = made("bert", "BertForSequenceClassification", **TINY)
    parts: dict[str, list[Tensor]] = {"query": [], "key": [], "value": [], "self": []}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            one = output[0] if isinstance(output, tuple) else output
            one.retain_grad()
            parts[name].append(one)

        return hook

    for layer in model.bert.encoder.layer:
        for name in parts:
            own = layer.attention.self if name == "self" else getattr(layer.attention.self, name)
            own.register_forward_hook(keep(name))
    with regard.watch(model, values=True) as seen:
        logits = model(tokens()).logits
    logits[:, 1].sum().backward()
    assert len(seen) == len(parts["self"]) == 2
    for number, weights in enumerate(seen.maps):
        by_heads = {
            name: relevance_of(found[number]).unflatten(-1, (4, -1)).transpose(1, 2) for name, found in parts.items()
        }
        found = attn_lrp(weights, by_heads["self"], epsilon=EPSILON)
        for name in ("query", "key", "value"):
            theirs = by_heads[name]
            assert float(theirs.abs().max()) > 1e-9
            torch.testing.assert_close(
                getattr(found, name), theirs, rtol=1e-6, atol=1e-9 * float(theirs.abs().max()), msg=name
            )


def test_vision_transformers_have_another_rule_inside_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    code = importlib.import_module("torchvision.models.vision_transformer")
    lxt.monkey_patch(code)
    torch.manual_seed(0)
    model = code.VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=4, hidden_dim=16, mlp_dim=24, num_classes=3
    )
    model = model.eval().double()
    torch.nn.init.normal_(model.heads[0].weight)
    attend, calls = F.scaled_dot_product_attention, []

    def kept(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = attend(query, key, value, *args, **kwargs)
        calls.append((value, output))
        for one in calls[-1]:
            one.retain_grad()
        return output

    monkeypatch.setattr(F, "scaled_dot_product_attention", kept)
    with regard.watch(model, values=True) as seen:
        logits = model(torch.randn(2, 3, 16, 16).double())
    logits[:, 1].sum().backward()
    assert len(calls) == len(seen) == 2
    for (value, output), weights in zip(calls, seen.maps, strict=True):
        found = attn_lrp(weights, relevance_of(output), epsilon=EPSILON)
        theirs = relevance_of(value)
        assert float(theirs.abs().max()) > 1e-9
        torch.testing.assert_close(2 * found.value, theirs, rtol=1e-6, atol=1e-9 * float(theirs.abs().max()))
