"""Windows and packed documents: work falls with the mask's density."""

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from benchmarks.harness import Row, compare, forward_backward
from regard.call.shapes import Sizes

TITLE = "Windows and packed documents against SDPA with the dense mask"
LENGTH, HEADS, DIM = 8192, 4, 64


def run() -> tuple[list[Row], list[str]]:
    q, k, v = (torch.randn(1, HEADS, LENGTH, DIM, requires_grad=True) for _ in range(3))
    documents = regard.documents(offsets=torch.arange(0, LENGTH + 1, 256))
    rows = []
    for what, mask, target in (("window of 256", regard.window(256), 8.0), ("32 documents of 256", documents, 10.0)):
        dense = mask.dense(Sizes((1,), HEADS, HEADS, LENGTH, LENGTH, True))

        def peer(q: Tensor, k: Tensor, v: Tensor, dense: Tensor = dense) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=dense)

        def ours(q: Tensor, k: Tensor, v: Tensor, mask: regard.Mask | None = mask) -> Tensor:
            return regard.attention(q, k, v, mask=mask)

        pair = forward_backward(peer, q, k, v), forward_backward(ours, q, k, v)
        rows.append(compare(f"{what}, T = {LENGTH}, forward + backward", *pair, target=target, seconds=10))
    batch = [t.detach().view(HEADS, -1, 256, DIM).transpose(0, 1).contiguous().requires_grad_() for t in (q, k, v)]
    padded = forward_backward(F.scaled_dot_product_attention, *batch)
    packed = forward_backward(lambda q, k, v: regard.attention(q, k, v, mask=documents), q, k, v)
    rows.append(compare("32 documents of 256 against SDPA on a batch of 32", padded, packed, target=1.0))
    return rows, []
