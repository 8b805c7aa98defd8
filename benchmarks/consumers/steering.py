"""Steering a language model by the weights of some words, and what an edit costs beside the same run unedited."""

import logging
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import regard
from benchmarks.consumers.frame import LENGTHS, Report, measure
from benchmarks.harness import Run, compare
from regard.edits import Edit, Knockout, Reweight

TITLE = "Consumers: attention that is edited while a model runs"
LAYERS, HEADS, WIDTH = 2, 8, 512
SPAN, FACTOR = slice(3, 9), 20.0
STEER = Reweight(SPAN, FACTOR, heads=[0, 3, 5])
EDITS: dict[str, Edit] = {
    "a factor for six keys in three heads": STEER,
    "six keys cut": Knockout(SPAN),
    "the last query cut from six keys": Knockout(SPAN, queries=-1),
}


def setting(length: int, implementation: str) -> tuple[nn.Module, Tensor]:
    """A model and the tokens of one sequence."""
    import transformers

    kind: Any = transformers.GPT2Model
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=100, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=length, bos_token_id=1, eos_token_id=2
    )
    return kind._from_config(config, attn_implementation=implementation).eval(), torch.randint(3, 100, (1, length))


def steered_eagerly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Attention written out, with the factor in it: as PASTA's own code does, on dense weights."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill_(later, -torch.inf).softmax(-1)
    for head in (0, 3, 5):
        weights[:, head, :, SPAN] *= FACTOR
        weights[:, head] /= weights[:, head].sum(-1, keepdim=True)
    return (weights @ value).transpose(1, 2).contiguous(), None


def eager(length: int) -> Run:
    import transformers

    transformers.AttentionInterface.register("steered_eagerly", steered_eagerly)
    model, ids = setting(length, "eager")
    model.set_attn_implementation("steered_eagerly")
    return partial(_hidden, model, ids)


def ours(length: int) -> Run:
    model, ids = setting(length, "sdpa")
    return partial(_edited, model, ids, STEER)


@torch.no_grad()
def _hidden(model: nn.Module, ids: Tensor) -> Tensor:
    found: Tensor = model(ids, use_cache=False).last_hidden_state
    return found


def _edited(model: nn.Module, ids: Tensor, edit: Edit) -> Tensor:
    with regard.edit(model, {"h.*.attn": edit}):
        return _hidden(model, ids)


def beside_unedited() -> list[str]:
    """For each edit, its time over that of the unedited run of the same fused model."""
    lines = []
    for name, edit in EDITS.items():
        ratios = []
        for length in LENGTHS:
            model, ids = setting(length, "sdpa")
            times = compare(
                name, partial(_hidden, model, ids), partial(_edited, model, ids, edit), seconds=4.0, pairs=3
            )
            ratios.append(f"{1 / times.ratio:.2f} ({1 / times.high:.2f} to {1 / times.low:.2f}) at T = {length}")
        lines.append(f"Edited over unedited, {name}: {'; '.join(ratios)}.")
        print(lines[-1], flush=True)
    return lines


def run() -> Report:
    rows, notes = measure(
        __name__,
        note=f"A forward pass of {LAYERS} layers of {HEADS} heads, in which six keys get {FACTOR:g} times their weight "
        "in three heads: written into eager attention, and as an edit.",
    )
    return rows, [*notes, *beside_unedited()]
