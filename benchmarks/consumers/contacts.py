"""Contacts of a protein by ESM: its own head on the matrices of every head, against sums of joined maps."""

import logging
from typing import Any

import torch
from torch import Tensor

import regard
from benchmarks.consumers.frame import Report, measure
from benchmarks.harness import Run

TITLE = "Consumers: contacts of a protein (ESM)"
LAYERS, HEADS, WIDTH = 4, 8, 128


def setting(length: int, implementation: str) -> tuple[Any, Tensor]:
    """A model, and the tokens of one protein between its two marks."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    kind: Any = transformers.EsmModel
    torch.manual_seed(0)
    config = transformers.EsmConfig(
        vocab_size=33, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, position_embedding_type="rotary", pad_token_id=1, mask_token_id=32,
        max_position_embeddings=length + 2,
    )  # fmt: skip
    model = kind._from_config(config, attn_implementation=implementation).eval()
    tokens = torch.randint(4, 24, (1, length))
    tokens[0, 0], tokens[0, -1] = 0, 2
    return model, tokens


def eager(length: int) -> Run:
    model, tokens = setting(length, "eager")

    @torch.no_grad()
    def run() -> Tensor:
        contacts: Tensor = model.predict_contacts(tokens, torch.ones_like(tokens))
        return contacts

    return run


def ours(length: int) -> Run:
    model, tokens = setting(length, "sdpa")
    regard.huggingface.enable(model)
    head = model.contact_head.regression

    @torch.no_grad()
    def run() -> Tensor:
        attentions = model(tokens, output_attentions=True).attentions
        heads: Any = torch.cat(attentions, 1)[..., 1:-1, 1:-1]
        sums = heads.sum(-1) + heads.sum(-2)
        share = head.weight[0] / sums.sum(-1)
        one = heads.average(1, weights=head.weight[0]).dense() * head.weight[0].sum()
        logits = one + one.mT - torch.einsum("bci,bcj,bc->bij", sums, sums, share) + head.bias
        return logits.sigmoid()

    return run


def run() -> Report:
    return measure(
        __name__,
        lengths=(512, 2048),
        pairs=2,
        note=f"{LAYERS} layers of {HEADS} heads, one protein, forward pass and contacts: `predict_contacts` on "
        "eager attention, and the same formula on joined maps, whose answer (T, T) is its only matrix.",
    )
