"""Five statistics of every head together against one fused pass of the attention itself, and what a block errs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from benchmarks.harness import Row, compare, without_gradients

TITLE = "Received, entropy, top-8, mean and max picture of 256 x 256 together, against one fused pass"
HEADS, DIM = 12, 64
NAMES = ("received", "entropy", "top_keys", "pooled_mean", "pooled_max")


def run() -> tuple[list[Row], list[str]]:
    """The bar is 1.25 times the time of the pass: a ratio of 0.8."""
    rows = []
    for length in (512, 1024, 2048, 4096, 8192):
        q, k, v = (torch.randn(1, HEADS, length, DIM) for _ in range(3))
        with torch.no_grad():
            weights = regard.attention(q, k, v, mask=regard.causal(), return_weights=True).weights

        def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def five(weights: regard.AttentionMap = weights) -> Any:
            return weights.summary(*NAMES)

        pair = without_gradients(fused, q, k, v), without_gradients(five)
        rows.append(compare(f"T = {length}, causal, float32", *pair, target=0.8, seconds=4.0))
    return rows, [exactness()]


def exactness() -> str:
    """The largest error of a weight against float64 from the same q and k, beside eager attention's own."""
    found = []
    for what, sharp in (("diffuse", 1.0), ("sharp", 12.0)):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            q, k = (sharp * torch.randn(1, 4, 1024, DIM)).to(dtype), torch.randn(1, 4, 1024, DIM).to(dtype)
            exact = _eager(q.double(), k.double())
            weights = regard.attention(q, k, k, mask=regard.causal(), return_weights=True).weights
            ours, eager = (float((w.double() - exact).abs().max()) for w in (weights.dense(), _eager(q, k)))
            kind = str(dtype).removeprefix("torch.")
            found.append(f"{what} heads in {kind}: {ours:.1e}, eager {eager:.1e}")
    return (
        "Largest error of a weight against float64 from the same q and k, T = 1024, causal. " + "; ".join(found) + "."
    )


def _eager(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT * DIM**-0.5
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)
