"""Random nestings of modules that attend."""

import torch
from torch import Tensor, nn

from tests.fuzz.drawing import Drawn
from tests.fuzz.watch.kernels import Kernel
from tests.fuzz.watch.truths import Truths
from tests.fuzz.watch.written_out import DECOYS, TEXTBOOK, Decoy, Textbook, Writing, Written


class Nest(nn.Module):
    def __init__(self, children: list[tuple[nn.Module, int, str]]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(child for child, _, _ in children)
        self.times = [(times, on) for _, times, on in children]

    def forward(self, x: Tensor, memory: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """x (B, T, dim), memory (B, S, dim), keep (1, 1, T, S) for attention of x to itself."""
        for child, (times, on) in zip(self.inner, self.times, strict=True):
            for _ in range(times):
                other = memory if on == "memory" else None
                x = (x + child(x, other, keep if other is None else None)) / 2
        return x


def random_model(drawn: Drawn, truths: Truths, dim: int, depth: int = 2) -> Nest:
    children: list[tuple[nn.Module, int, str]] = []
    for _ in range(drawn.number(1, 3)):
        times = 2 if drawn.chance(6) else 1
        on = drawn.of(["self", "self", "memory"])
        if depth and drawn.chance(4):
            children.append((random_model(drawn, truths, dim, depth - 1), times, on))
        else:
            child = random_attention(drawn, truths, dim)
            children.append((child, times, "self" if isinstance(child, Textbook | Decoy) else on))
    return Nest(children)


def random_attention(drawn: Drawn, truths: Truths, dim: int) -> nn.Module:
    heads = drawn.of([2, 1, 4])
    torch.manual_seed(drawn.number(0, 999))
    match drawn.of(["written", "kernel", "written", "textbook", "decoy"]):
        case "kernel":
            return Kernel(dim, heads, drawn, truths)
        case "textbook":
            return Textbook(dim, drawn.of(TEXTBOOK), truths)
        case "decoy":
            return Decoy(dim, drawn.of(DECOYS), truths)
    return Written(dim, heads, Writing.random(drawn), truths)
