"""Constants that were chosen on one machine, asked on this one: each beside other values, where it decides.

    python -m benchmarks chosen_constants

The peer is regard itself with another value. A ratio above 1 says that the value in the source is the faster one
here; docs/design/choices.md has what each machine said.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import regard
from benchmarks.harness import Row, Run, compare, forward_backward, without_gradients
from regard.kernels import fused_kernels, fused_plan
from regard.maps.loop import one_loop
from regard.maps.statistics import tiles
from regard.tasks.training import losses as output_loss

TITLE = "Constants that were chosen on one machine"
HEADS, DIM = 8, 64


def with_value(module: ModuleType, name: str, value: Any, run: Run) -> Run:
    """The run while a constant of a module has another value."""

    def changed() -> object:
        with patch.object(module, name, value):
            return run()

    return changed


def against(what: str, module: ModuleType, name: str, value: Any, run: Run) -> Row:
    return compare(f"{name} = {value}: {what}", with_value(module, name, value, run), run, seconds=3.0, pairs=7)


def heads(length: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(batch, HEADS, length, DIM, dtype=dtype) for _ in range(3))
    return q, k, v


def backward_in_float32() -> list[Row]:
    """Half precision's backward in its own dtype, and in float32, which is taken up to SHORT queries."""
    rows = []
    for length in (64, 256, 512, 1024):
        vectors = [t.requires_grad_() for t in heads(length, max(1, 2048 // length), torch.bfloat16)]
        run = forward_backward(regard.attention, *vectors)
        other = 0 if length <= fused_kernels.SHORT else length
        rows.append(against(f"forward and backward in bf16, T = {length}", fused_kernels, "SHORT", other, run))
    return rows


def blocks_of_queries() -> list[Row]:
    """Masks that are cut into blocks: fewer sizes of blocks, and another cost of a call."""
    vectors, lengths = heads(2048), torch.tensor([700, 90, 400, 858])
    masks = {
        "a window of 128": regard.window(128),
        "a prefix of 300": regard.prefix(300),
        "documents": regard.causal() & regard.documents(torch.arange(4).repeat_interleave(lengths)[None]),
    }
    rows = []
    for name, mask in masks.items():
        run = without_gradients(lambda *qkv, m=mask: regard.attention(*qkv, mask=m), *vectors)
        for sizes in ((32, 128), (32, 256), (32, 512)):
            rows.append(against(f"{name}, T = 2048", fused_plan, "BLOCK_ROWS", sizes, run))
        for cost in (1 << 14, 1 << 18):
            rows.append(against(f"{name}, T = 2048", fused_plan, "PAIRS_A_CALL", cost, run))
    return rows


def statistics() -> list[Row]:
    """Statistics of a map by tiles, and of a small map by the loop or by tiles."""
    q, k, v = heads(2048)
    _, tiled = regard.attention(q, k, v, normalization=regard.Sigmoid(), return_weights=True)
    rows = [
        against("entropy of 8 heads, T = 2048", tiles, name, value, without_gradients(tiled.entropy))
        for name, values in {"TILE_ELEMENTS": (1 << 18, 1 << 22), "TILE_ROWS": (16, 256)}.items()
        for value in values
    ]
    for length in (256, 512):
        few = heads(length)

        def statistics_of(vectors: tuple[Tensor, Tensor, Tensor] = few) -> object:
            _, weights = regard.attention(*vectors, return_weights=True)
            return weights.summary(k=8, rows=64, columns=64)

        count = HEADS * length * length
        other = count if count < one_loop.SMALL else count + 1
        rows.append(
            against(f"statistics of {HEADS} x {length}^2", one_loop, "SMALL", other, torch.no_grad()(statistics_of))
        )
    return rows


def rows_of_a_product() -> list[Row]:
    """The rows whose logits exist at a time."""
    layer, hidden = nn.Linear(256, 8_000), torch.randn(4_096, 256, requires_grad=True)
    targets = torch.randint(0, 8_000, (4_096,))

    def loss() -> object:
        total, _ = output_loss.output_cross_entropy(hidden, layer, targets=targets, ignore_index=-1)
        return torch.autograd.grad(total, (hidden, layer.weight))

    return [
        against("loss and its gradients, 4,096 x 256 x 8,000", output_loss, "ROWS_OF_A_PRODUCT", value, loss)
        for value in (128, 256, 1_024, 4_096)
    ]


def run() -> tuple[list[Row], list[str]]:
    torch.manual_seed(0)
    parts: tuple[Callable[[], list[Row]], ...] = (
        backward_in_float32, blocks_of_queries, statistics, rows_of_a_product
    )  # fmt: skip
    rows = [row for part in parts for row in part()]
    return rows, [
        "The peer has the value that a row names; a ratio above 1 says that the value in the source is faster."
    ]
