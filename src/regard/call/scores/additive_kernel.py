"""Additive scores of a block by one Triton kernel on a GPU, without (t, s, A) elements in memory."""

import torch
from torch import Tensor

from regard.tensors.triton_use import runs_triton

KERNEL = "additive scores"
BLOCK = (16, 16, 32)
"""Rows, columns and hidden units in a program's registers."""
Pulled = tuple[Tensor, Tensor, Tensor]
"""The gradients of queries, keys and the vector; the last is 0 unless requested."""


def has_additive_kernel(query: Tensor) -> bool:
    """Whether the kernel takes these vectors: float32, on a GPU."""
    return query.dtype == torch.float32 and runs_triton(query.device, KERNEL)


def scores_by_kernel(query: Tensor, key: Tensor, vector: Tensor) -> Tensor:
    """The scores (..., t, s) of queries (..., t, A) and keys (..., s, A)."""
    from regard.call.scores import triton_additive

    lead, q, k = _flat(query, key)
    cells, queries, hidden = q.shape
    keys, (rows, columns, units) = k.shape[1], BLOCK
    scores = q.new_empty(cells, queries, keys)
    if scores.numel():
        programs = cells * -(-queries // rows) * -(-keys // columns)
        triton_additive.add_scores[(programs,)](
            q, k, vector.float().contiguous(), scores, queries, keys, hidden,
            ROWS=rows, COLUMNS=columns, UNITS=units,
        )  # fmt: skip
    return scores.view(*lead, queries, keys)


def pulled_by_kernel(query: Tensor, key: Tensor, vector: Tensor, gradient: Tensor, *, finds_vector: bool) -> Pulled:
    """The gradients of queries, keys and the vector, from those of the scores (..., t, s)."""
    from regard.call.scores import triton_additive

    lead, q, k = _flat(query, key)
    cells, queries, hidden = q.shape
    keys, (rows, columns, units) = k.shape[1], BLOCK
    gradient = gradient.reshape(cells, queries, keys).contiguous()
    d_query, d_key = torch.zeros_like(q), torch.zeros_like(k)
    parts = q.new_zeros(cells * -(-queries // rows) if finds_vector else 1, hidden)
    vector = vector.float().contiguous()
    blocks_of_units = -(-hidden // units)

    def pull(one: Tensor, other: Tensor, d_one: Tensor, steps: tuple[int, int], wants: bool) -> None:
        count, length = one.shape[1], other.shape[1]
        if cells and count and length:
            triton_additive.pull_rows[(cells * -(-count // rows) * blocks_of_units,)](
                one, other, vector, gradient, d_one, parts, count, length, hidden, *steps,
                FINDS_VECTOR=wants, ROWS=rows, COLUMNS=columns, UNITS=units,
            )  # fmt: skip

    pull(q, k, d_query, (keys, 1), finds_vector)
    pull(k, q, d_key, (1, keys), False)
    return d_query.view(*lead, queries, hidden), d_key.view(*lead, keys, hidden), parts.sum(0)


def _flat(query: Tensor, key: Tensor) -> tuple[tuple[int, ...], Tensor, Tensor]:
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    q, k = (x.expand(*lead, *x.shape[-2:]).reshape(-1, *x.shape[-2:]).contiguous() for x in (query, key))
    return tuple(lead), q, k
