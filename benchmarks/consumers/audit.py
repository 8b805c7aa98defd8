"""How much weight each layer of an encoder puts on padding when its mask was forgotten."""

import logging
from typing import Any

import torch
from torch import Tensor

import regard
from benchmarks.consumers.frame import Report, measure
from benchmarks.harness import Run

TITLE = "Consumers: an audit that finds weight on padding"
LAYERS, HEADS, WIDTH = 2, 8, 256


def setting(length: int, implementation: str) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """A model, the tokens of two sequences, and which of these are real."""
    import transformers

    kind: Any = transformers.BertModel
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, max_position_embeddings=length,
    )  # fmt: skip
    real = torch.arange(length) < torch.tensor([[length], [length * 3 // 4]])
    model = kind._from_config(config, attn_implementation=implementation, add_pooling_layer=False)
    return model.eval(), torch.randint(3, 100, (2, length)), real


def eager(length: int) -> Run:
    model, ids, real = setting(length, "eager")

    @torch.no_grad()
    def run() -> Tensor:
        maps = [m * real[:, None, :, None] for m in model(ids, output_attentions=True).attentions]
        return torch.stack([(m * ~real[:, None, None]).sum() / m.sum() for m in maps])

    return run


def ours(length: int) -> Run:
    model, ids, real = setting(length, "sdpa")

    @torch.no_grad()
    def run() -> Tensor:
        with regard.watch(model) as seen:
            model(ids)
        return torch.tensor([float(found.numbers["share"]) for found in seen.audit(padding=real)])

    return run


def run() -> Report:
    return measure(
        __name__,
        note=f"{LAYERS} layers of {HEADS} heads, a batch of two, the second padded: the forward pass together with the "
        "share of each layer's weight that is on padding; ours finds the kinds of the masks as well.",
    )
