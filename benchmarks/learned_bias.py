"""T5's and learned dense biases against SDPA with that bias, which torch computes T x S."""

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from benchmarks.harness import Row, compare, forward_backward

TITLE = "Learned biases against SDPA with the bias (quadratic)"
HEADS, DIM, LENGTH = 8, 64, 4096


def run() -> tuple[list[Row], list[str]]:
    q, k, v = (torch.randn(1, HEADS, LENGTH, DIM, requires_grad=True) for _ in range(3))
    table = torch.randn(32, HEADS, requires_grad=True)
    bias = regard.T5Bias(table)
    distance = torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]
    bucket = regard.call.biases.relative.t5_bucket(distance, num_buckets=32, bidirectional=True, max_distance=128)

    def peer(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=table[bucket].permute(2, 0, 1)[None])

    def ours(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return regard.attention(q, k, v, bias=regard.T5Bias(table))

    del bias
    what = f"T = {LENGTH}, {HEADS} heads, forward + backward"
    rows = [
        compare(
            f"T5 bias, {what}",
            forward_backward(peer, q, k, v, table),
            forward_backward(ours, q, k, v, table),
            target=1.5,
            seconds=15,
        )
    ]
    dense = torch.randn(1, HEADS, LENGTH, LENGTH, requires_grad=True)
    rows.append(
        compare(
            f"dense learned bias, {what}",
            forward_backward(lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, attn_mask=b), q, k, v, dense),
            forward_backward(lambda q, k, v, b: regard.attention(q, k, v, bias=b), q, k, v, dense),
            target=1.5,
            seconds=15,
        )
    )
    return rows, []
