"""The relevance of every token for the first one, by the rules of Chefer et al., with one backward pass."""

import logging
from typing import Any

import torch
from torch import Tensor

import regard
from benchmarks.consumers.frame import Report, measure
from benchmarks.harness import Run

TITLE = "Consumers: relevance of tokens through all layers"
LAYERS, HEADS, WIDTH = 2, 4, 128


def setting(length: int, implementation: str) -> tuple[torch.nn.Module, Tensor]:
    """A model and the tokens of a sequence."""
    import transformers

    kind: Any = transformers.BertForSequenceClassification
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, max_position_embeddings=length,
    )  # fmt: skip
    model = kind._from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # Weights of transformers' size would make every map nearly uniform.
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval(), torch.randint(3, 100, (1, length))


def eager(length: int) -> Run:
    model, ids = setting(length, "eager")

    def run() -> Tensor:
        model.zero_grad()
        outputs = model(ids, output_attentions=True)
        for weights in outputs.attentions:
            weights.retain_grad()
        outputs.logits[0, 0].backward()
        with torch.no_grad():
            row = torch.nn.functional.one_hot(torch.tensor([0]), length).float()
            for weights in reversed(outputs.attentions):
                row = row + row @ (weights * weights.grad).clamp(min=0).mean(1)[0]
        return row

    return run


def ours(length: int) -> Run:
    model, ids = setting(length, "sdpa")

    def run() -> Tensor:
        model.zero_grad()
        with regard.watch(model, values=True, gradients=True) as seen:
            outputs = model(ids)
        outputs.logits[0, 0].backward()
        return regard.watching.relevance(seen).rows(0)

    return run


def run() -> Report:
    return measure(
        __name__,
        note=f"A classifier of {LAYERS} layers of {HEADS} heads: forward, backward, and the row of the first token. "
        "Eager has `output_attentions=True`, `retain_grad()`, and its row goes back through the layers as ours does: "
        "the published code multiplies whole matrices.",
    )
