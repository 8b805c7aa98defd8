"""H2O: a prompt whose cache is cut to 256 keys of each layer as it is read, by the attention that keys receive."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import regard
from benchmarks.consumers.frame import Report, measure
from benchmarks.harness import Run
from regard.maps import selection

TITLE = "Consumers: eviction of keys by H2O"
LAYERS, HEADS, WIDTH, BUDGET = 2, 8, 256, 256
NOTE = (
    f"{LAYERS} layers of {HEADS} heads over {HEADS // 2} key heads, one prompt, the cache of each layer cut to {BUDGET}"
    " keys before the next layer runs; the eager way reads the weights in a hook, as kvpress does. The difference is"
    " that of the scores."
)


def setting(length: int, implementation: str) -> tuple[Any, Tensor]:
    """A model with a key head for two query heads, and the tokens of one prompt."""
    import transformers

    kind: Any = transformers.LlamaModel
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2, intermediate_size=2 * WIDTH, max_position_embeddings=length,
    )  # fmt: skip
    return kind._from_config(config, attn_implementation=implementation).eval(), torch.randint(3, 100, (1, length))


def eager_by(score: Callable[[Tensor], Tensor], length: int) -> Run:
    """The run that scores the dense weights of each layer in a hook, and cuts its cache."""
    model, ids = setting(length, "eager")

    @torch.no_grad()
    def run() -> tuple[Tensor, ...]:
        scores: list[Tensor] = []

        def cut(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            scores.append(score(output[1].unflatten(1, (layer.keys.shape[1], -1)).mean(2)))
            kept = selection.keep(scores[-1], min(BUDGET, length))
            at = kept[..., None].expand(-1, -1, -1, layer.keys.shape[-1])
            layer.keys, layer.values = layer.keys.gather(2, at), layer.values.gather(2, at)

        hooks = [layer.self_attn.register_forward_hook(cut, with_kwargs=True) for layer in model.layers]
        try:
            model(ids)
        finally:
            for hook in hooks:
                hook.remove()
        return tuple(one.nan_to_num(posinf=0.0) for one in scores)

    return run


def ours_by(score: Callable[[regard.AttentionMap], Tensor], length: int) -> Run:
    """The run that scores the map of each call, and keeps keys."""
    model, ids = setting(length, "sdpa")

    @torch.no_grad()
    def run() -> tuple[Tensor, ...]:
        scores: list[Tensor] = []

        def cut(name: str, weights: regard.AttentionMap, *vectors: Tensor | None) -> regard.KeepKeys:
            scores.append(score(weights))
            return regard.KeepKeys(selection.keep(scores[-1], min(BUDGET, length)))

        with regard.on_attention(model, cut):
            model(ids)
        return tuple(one.nan_to_num(posinf=0.0) for one in scores)

    return run


def eager(length: int) -> Run:
    return eager_by(lambda weights: weights.sum(2), length)


def ours(length: int) -> Run:
    return ours_by(selection.accumulated, length)


def run() -> Report:
    return measure(__name__, eager_up_to=2048, note=NOTE)
