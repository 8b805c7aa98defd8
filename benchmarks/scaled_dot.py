"""Scaled dot product, and the same asked for the weights, against F.scaled_dot_product_attention."""

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from benchmarks.harness import Row, compare, forward_backward, peak_memory_mib, without_gradients

TITLE = "Scaled dot product against F.scaled_dot_product_attention"
COLUMNS = {
    ", forward": "forward",
    ", forward, with weights": "forward, with weights",
    ", forward + backward": "forward + backward",
}
"""The columns of the table, by the ends of the rows' names."""
HEADS, DIM = 8, 64


def run() -> tuple[list[Row], list[str]]:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for length in (512, 2048, 8192):
            for causal in (False, True):
                q, k, v = (torch.randn(1, HEADS, length, DIM, dtype=dtype, requires_grad=True) for _ in range(3))
                mask = regard.causal() if causal else None

                def peer(q: Tensor, k: Tensor, v: Tensor, causal: bool = causal) -> Tensor:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

                def ours(q: Tensor, k: Tensor, v: Tensor, mask: regard.Mask | None = mask) -> Tensor:
                    return regard.attention(q, k, v, mask=mask)

                def asked(q: Tensor, k: Tensor, v: Tensor, mask: regard.Mask | None = mask) -> Tensor:
                    return regard.attention(q, k, v, mask=mask, return_weights=True).output

                what = f"{str(dtype).removeprefix('torch.')}, T = {length}{', causal' if causal else ''}"
                seconds = 4.0 if length < 8192 else 6.0
                plain = without_gradients(peer, q, k, v)
                rows.append(
                    compare(f"{what}, forward", plain, without_gradients(ours, q, k, v), target=0.98, seconds=seconds)
                )
                rows.append(
                    compare(
                        f"{what}, forward, with weights",
                        plain,
                        without_gradients(asked, q, k, v),
                        target=0.97,
                        seconds=seconds,
                    )
                )
                if length < 8192:
                    both = forward_backward(peer, q, k, v), forward_backward(ours, q, k, v)
                    rows.append(compare(f"{what}, forward + backward", *both, target=0.98, seconds=seconds))
    memory = {name: peak_memory_mib(MEMORY.format(call=call)) for name, call in CALLS.items()}
    note = "Peak memory of forward + backward above the inputs, T = 4096, float32, fresh processes: "
    return rows, [note + ", ".join(f"{name} {mib:.0f} MiB" for name, mib in memory.items()) + "."]


MEMORY = """
q, k, v = (torch.randn(1, 8, 4096, 64, requires_grad=True) for _ in range(3))
def run():
    output = {call}
    output.sum().backward()
"""
CALLS = {
    "F.scaled_dot_product_attention": "torch.nn.functional.scaled_dot_product_attention(q, k, v)",
    "regard.attention": "regard.attention(q, k, v)",
    "regard.attention with weights": "regard.attention(q, k, v, return_weights=True).output",
}
