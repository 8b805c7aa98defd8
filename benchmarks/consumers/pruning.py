"""EViT: a vision transformer in which 0.7 of the patches go on, three times, by the attention of the class token."""

import logging
import math
from typing import Any

import torch
from torch import Tensor

import regard
from benchmarks.consumers.frame import Report, measure
from benchmarks.harness import Run
from regard.maps import selection

TITLE = "Consumers: pruning of the tokens of an image by EViT"
LAYERS, HEADS, WIDTH, RATE, WHERE, PATCH = 4, 8, 256, 0.7, (0, 1, 2), 4


def setting(length: int, implementation: str) -> tuple[Any, Tensor]:
    """A vision transformer, and an image of about so many patches."""
    import transformers

    kind: Any = transformers.ViTModel
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    size = PATCH * math.isqrt(length)
    config = transformers.ViTConfig(
        image_size=size, patch_size=PATCH, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
    )  # fmt: skip
    model = kind._from_config(config, attn_implementation=implementation, add_pooling_layer=False).eval()
    return model, torch.randn(1, 3, size, size)


def kept(scores: Tensor) -> Tensor:
    return selection.keep(scores, 1 + math.ceil(RATE * (scores.shape[-1] - 1)), first=1)


def eager(length: int) -> Run:
    model, image = setting(length, "eager")
    weights: dict[int, Tensor] = {}

    def read(number: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            weights[number] = output[1]

        return hook

    def cut(number: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            at = kept(weights.pop(number)[:, :, 0].mean(1))[..., None].expand(-1, -1, WIDTH)
            hidden = hidden.gather(1, at)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return hook

    for number in WHERE:
        model.layers[number].attention.register_forward_hook(read(number))
        model.layers[number].register_forward_hook(cut(number))

    @torch.no_grad()
    def run() -> Tensor:
        found: Tensor = model(image).last_hidden_state
        return found[:, 0]

    return run


def ours(length: int) -> Run:
    model, image = setting(length, "sdpa")

    def keep(name: str, weights: regard.AttentionMap, *vectors: Tensor | None) -> regard.KeepTokens | None:
        chosen = int(name.split(".")[1]) in WHERE
        return regard.KeepTokens(kept(selection.class_token(weights))) if chosen else None

    @torch.no_grad()
    def run() -> Tensor:
        with regard.on_attention(model, keep):
            found: Tensor = model(image).last_hidden_state
        return found[:, 0]

    return run


def run() -> Report:
    note = (
        f"{LAYERS} layers of {HEADS} heads, one image of about T patches, {RATE} of the patches go on after each of the"
        " first three layers; the difference is that of the class token at the end."
    )
    return measure(__name__, eager_up_to=2048, note=note)
