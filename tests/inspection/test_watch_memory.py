"""The memory of a watch, counted on the tensors that are alive: queries, keys and one number a row, and hardly more."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from tests.inspection.huggingface_families import LLAMA, built
from tests.modules import watching

transformers = pytest.importorskip("transformers")

# transformers calls what torch has deprecated; nothing of it is ours.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
B, T, LAYERS, HEADS, GROUPS, WIDTH = 2, 67, 2, 8, 2, 128


def gpt2() -> tuple[Any, int]:
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 2 * T}
    return built("GPT2Model", {"vocab_size": 61, **sizes}), HEADS


def llama() -> tuple[Any, int]:
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": HEADS}
    more = {"num_key_value_heads": GROUPS, "max_position_embeddings": 2 * T}
    return built("LlamaModel", LLAMA | sizes | more), GROUPS


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """What transformers imports at the first use lives to the end: no collection looks at it again."""
    gpt2(), llama()
    gc.collect()
    gc.freeze()


def storages() -> dict[int, int]:
    gc.collect()
    # What torch.compile and torch.vmap may have left behind has no memory of its own.
    kinds = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    alive = [t for t in gc.get_objects() if type(t) in kinds and not torch._C._functorch.is_batchedtensor(t)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}


def inputs(padding: str) -> dict[str, Tensor]:
    ids = torch.randint(3, 61, (B, T), generator=torch.Generator().manual_seed(0))
    if padding == "none":
        return {"input_ids": ids}
    keep = torch.ones(B, T, dtype=torch.long)
    keep[1, slice(None, 9) if padding == "left" else slice(-9, None)] = 0
    return {"input_ids": ids, "attention_mask": keep}


def factors(key_heads: int, queries: int = T, keys: int = T) -> int:
    head = WIDTH // HEADS
    return LAYERS * B * 4 * (HEADS * queries * head + key_heads * keys * head + HEADS * queries)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_factors_and_no_more_than_a_twentieth(make: Callable[..., Any], padding: str, context: type[Any]) -> None:
    model, key_heads = make()
    given = inputs(padding)
    with context():
        model(**given, use_cache=False)
        before = storages()
        seen = watching(model, verify=True)(**given, use_cache=False)
    held = sum(size for place, size in storages().items() if place not in before)
    assert factors(key_heads) <= held <= 1.05 * factors(key_heads)
    assert factors(key_heads) <= seen.report().held_bytes <= held
    assert max(call.error for call in seen.calls) < 1e-5
    source: Any = seen.maps[0].source
    assert source.call.key.shape[1] == key_heads


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_generation_holds_the_keys_of_its_last_step(make: Callable[..., Any]) -> None:
    model, key_heads = make()
    cached = transformers.DynamicCache(config=model.config)
    ids = inputs("none")["input_ids"]
    with torch.no_grad():
        model(ids[:, :1])
        before = storages()
        with regard.watch(model) as seen:
            cache = model(ids[:, :40], past_key_values=cached).past_key_values
            for n in range(40, T):
                cache = model(ids[:, n : n + 1], past_key_values=cache).past_key_values
    del cache, cached
    seen.report()  # It asks for all that is kept: a late copy is no tensor before.
    held = sum(size for place, size in storages().items() if place not in before)
    assert factors(key_heads) <= held <= 1.05 * factors(key_heads)
    assert seen.joined(seen.calls[0].name).shape == (B, HEADS, T, T)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_dense_mask_of_a_kind_is_not_held(kind: torch.dtype, padding: str) -> None:
    model, key_heads = gpt2()
    keep = torch.ones(T, T, dtype=torch.bool).tril() & inputs(padding)["attention_mask"].bool()[:, None, None]
    mask = keep if kind == torch.bool else torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(kind).min)
    given: dict[str, Any] = {"input_ids": inputs("none")["input_ids"], "attention_mask": mask, "use_cache": False}
    with torch.no_grad():
        model(**given)
    before = storages()
    seen = watching(model, verify=True)(**given)
    held = sum(size for place, size in storages().items() if place not in before)
    assert factors(key_heads) <= held <= 1.05 * factors(key_heads)
    live = keep.any(-1)[:, 0]
    assert ((seen.maps[0].dense() > 0)[:, 0][live]).equal(keep[:, 0][live])
