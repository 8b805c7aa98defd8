"""Watched models whose weights, masks and functions others change after the call."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import note
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import regard
from tests.fuzz.drawing import Drawn
from tests.fuzz.lifetimes.subject import Life, Subject

DIM, HEADS, LENGTH = 8, 2, 5


class Attention(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.qkv, self.latents = nn.Linear(DIM, 3 * DIM), nn.Parameter(torch.randn(1, HEADS, LENGTH, DIM // HEADS))
        self.added = nn.Parameter(torch.randn(LENGTH, LENGTH))
        self.keep: Tensor
        self.register_buffer("keep", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
        self.width = 2

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        match self.how:
            case "learned queries":
                q = self.latents.expand(len(x), -1, -1, -1)
            case "learned mask":
                return F.scaled_dot_product_attention(q, k, v, attn_mask=self.added)
            case "buffer":
                return F.scaled_dot_product_attention(q, k, v, attn_mask=self.keep)
            case "flex":
                return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + self.added[i, j] * self.width)
            case "written out":
                return (q @ k.mT + self.added).softmax(-1) @ v
            case "regard":
                return regard.attention(q, k, v, bias=self.added, mask=self.keep)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def widen(self) -> None:
        self.width += 1


class Layer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer: nn.Module
        if how == "layer":
            self.layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, 0.0, batch_first=True)
        else:
            self.layer = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) if self.how == "layer" else self.layer(x, x, x, need_weights=self.how == "weights")[0]


HOWS = ["kernel", "learned queries", "learned mask", "buffer", "flex", "written out", "regard"]
OPTIONS: list[dict[str, Any]] = [{}, {"copy": True}, {"verify": True}, {"keep": "cpu"}, {"values": True}]


def watched(drawn: Drawn) -> Subject:
    how = drawn.of([*HOWS, "layer", "weights", "no weights"])
    model: Any = Attention(how) if how in HOWS else Layer(how)
    model.train(drawn.chance())
    # Uncompiled FlexAttention has no backward pass on the CPU.
    modes = [torch.no_grad] if how == "flex" else [torch.enable_grad, torch.no_grad, torch.inference_mode]
    options, mode = drawn.of(OPTIONS), drawn.of(modes)
    note(f"watched: {how}, {options}, {mode.__name__}, {'training' if model.training else 'eval'}")
    x = drawn.normal(2, LENGTH, DIM).float()

    def run() -> Life:
        with mode(), regard.watch(model, **options) as seen:
            output = model(x)

        def read() -> Tensor:
            (key,) = seen.keys() or [("", 0)]
            return seen[key].dense().detach().double()

        return Life(read, output)

    subject = Subject("watched", run, list(model.parameters()), [*model.buffers()], modules=[model])
    # A write to `x.data` is one that nothing notices, as the page on watching says.
    subject.variables += [
        lambda: x.add_(1.0),
        lambda: model.train(not model.training),
        lambda: _move_memory(model),
        lambda: torch.nn.utils.vector_to_parameters(
            torch.cat([p.detach().flatten() for p in model.parameters()]) + 1.0, model.parameters()
        ),
    ]
    if how == "flex":
        subject.variables.append(model.widen)
    return subject


def _move_memory(model: nn.Module) -> None:
    """New memory for each parameter, and none for the old, as sharding and offloading do."""
    for parameter in model.parameters():
        old = parameter.data
        parameter.data = old.clone() * 2
        memory = old.untyped_storage()
        if memory.resizable() and memory.nbytes() == old.numel() * old.element_size():
            memory.resize_(0)


MODELS: dict[str, Callable[[Drawn], Subject]] = {"watched": watched}
