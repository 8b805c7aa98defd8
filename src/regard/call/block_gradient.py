"""The backward pass of a block of scores, or of a bias, through autograd."""

from collections.abc import Sequence

import torch
from torch import Tensor


def pull_through_graph(
    block: Tensor, grad: Tensor, vectors: tuple[Tensor, Tensor], learned: Sequence[Tensor], totals: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The gradients of the query and the key of a block; the gradients of `learned` are added to `totals`.

    The graph is retained, because all blocks share the graphs of the selected learned tensors.

    >>> query, key = torch.ones(1, 2, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    >>> pull_through_graph(query @ key.mT, torch.ones(1, 3), (query, key), (), ())[0]
    tensor([[3., 3.]])
    """
    d_query, d_key, *others = torch.autograd.grad(
        block, (*vectors, *learned), grad, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    for total, other in zip(totals, others, strict=True):
        total += other
    return d_query, d_key
