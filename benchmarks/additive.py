"""Additive attention against the broadcast form, which holds T x S x A numbers."""

import time
from typing import Any

import torch
from torch import Tensor

import regard
from benchmarks.harness import Row, compare, forward_backward, peak_memory_mib, without_gradients

TITLE = "Additive attention against the broadcast form (as d2l writes it)"
BATCH, HIDDEN = 8, 128


def broadcast(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return torch.bmm((torch.tanh(q[:, :, None] + k[:, None]) @ w).softmax(-1), v)


def tiled(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return regard.attention(q, k, v, score=regard.Additive(w))


def keops(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    """With tanh x = 1 - 2 / (exp 2x + 1), since its symbolic tensors have no tanh."""
    from pykeops.torch import LazyTensor

    hidden = LazyTensor(q[0, :, None]) + LazyTensor(k[0, None])
    scores = ((1 - 2 / ((2 * hidden).exp() + 1)) * LazyTensor(w[None, None])).sum(-1)
    return scores.sumsoftmaxweight(LazyTensor(v[0, None]), axis=1)


def run() -> tuple[list[Row], list[str]]:
    q, k, v = (torch.randn(BATCH, 512, HIDDEN, requires_grad=True) for _ in range(3))
    w = torch.randn(HIDDEN, requires_grad=True)
    what = f"T = S = 512, width {HIDDEN}, batch {BATCH}"
    forward = without_gradients(broadcast, q, k, v, w), without_gradients(tiled, q, k, v, w)
    both = forward_backward(broadcast, q, k, v, w), forward_backward(tiled, q, k, v, w)
    rows = [
        compare(f"{what}, forward", *forward, target=6.0, seconds=10),
        compare(f"{what}, forward + backward", *both, target=3.0, seconds=12),
    ]
    notes = []
    q, k, v = (torch.randn(1, 2048, HIDDEN) for _ in range(3))
    w = w.detach()
    try:
        start = time.perf_counter()
        keops(q, k, v, w)
        notes.append(
            f"KeOps compiled for {time.perf_counter() - start:.0f} s before its first answer; ours needs none."
        )
    except ImportError:
        notes.append("KeOps is not installed here: `pip install --group bench` adds it to this table.")
    else:
        sides = without_gradients(keops, q, k, v, w), without_gradients(tiled, q, k, v, w)
        rows.append(compare(f"T = S = 2048, width {HIDDEN}, forward: KeOps", *sides, target=1.0, seconds=10))
    peer, ours = (peak_memory_mib(MEMORY.format(call=call)) for call in (BROADCAST, TILED))
    note = (
        f"Peak memory of forward + backward above the inputs, fresh processes: {peer:.0f} MiB against {ours:.0f} MiB, "
    )
    return rows, [*notes, note + f"{ours / peer:.3f} of it (asked: under 0.05)."]


BROADCAST = "torch.bmm((torch.tanh(q[:, :, None] + k[:, None]) @ w).softmax(-1), v)"
TILED = "regard.attention(q, k, v, score=regard.Additive(w))"
MEMORY = """
q, k, v = (torch.randn(8, 512, 128, requires_grad=True) for _ in range(3))
w = torch.randn(128, requires_grad=True)
def run():
    output = {call}
    output.sum().backward()
"""
