"""bf16 forward against F.scaled_dot_product_attention, and what else was tried to be faster than its kernel."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from benchmarks.harness import Row, compare, without_gradients

TITLE = "bf16 forward on the CPU, against F.scaled_dot_product_attention"
HEADS, LENGTH, DIM = 8, 4096, 64


def eager_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The products in bf16, the softmax in float32, by tiles of 256 queries; bmm rounds the scores to bf16."""
    out = torch.empty_like(q)
    for head in range(HEADS):
        for rows in range(0, LENGTH, 256):
            part = slice(rows, rows + 256)
            scores = (q[0, head, part] @ k[0, head].T).float().mul_(DIM**-0.5)
            torch.mm(scores.softmax(-1).to(q.dtype), v[0, head], out=out[0, head, part])
    return out


def run() -> tuple[list[Row], list[str]]:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.randn(1, HEADS, LENGTH, DIM, dtype=torch.bfloat16) for _ in range(3))
    ways: dict[str, Any] = {
        "regard.attention": (regard.attention, 1.3),
        "torch.compile(flex_attention)": (torch.compile(flex_attention), None),
        "eager tiles with bf16 products": (eager_tiles, None),
    }
    peer = F.scaled_dot_product_attention
    exact = peer(q.double(), k.double(), v.double())
    rows, errors = [], []
    for name, (way, target) in {"the kernel itself": (peer, None), **ways}.items():
        with torch.no_grad():
            error = float((way(q, k, v).double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
        errors.append(f"{name} {error:.2e}")
        if way is not peer:
            sides = without_gradients(peer, q, k, v), without_gradients(way, q, k, v)
            rows.append(compare(f"{name}, T = {LENGTH}", *sides, target=target))
    flops = 4 * HEADS * LENGTH**2 * DIM
    square = torch.randn(4096, 4096, dtype=torch.bfloat16)
    product = compare("", lambda: square @ square, lambda: peer(q, k, v), seconds=2)
    share = (flops / product.ours) / (2 * 4096**3 / product.peer)
    return rows, [
        f"The kernel runs at {share:.2f} of the rate of a 4096 x 4096 x 4096 bf16 matrix product.",
        "Relative error (root mean square) against float64: " + ", ".join(errors) + ".",
    ]
