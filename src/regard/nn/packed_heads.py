"""Split the heads of one product; gradients return without a copy if they are adjacent in memory."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.kernels.side_by_side import heads_together
from regard.tensors.guards import in_forward_mode, is_recorded, may_be_kept


def split_heads(heads: Float[Tensor, "... H D"], counts: Sequence[int]) -> list[Tensor]:
    """Split the heads of one product into those of queries, keys and values.

    The gradient of torch's own `split` copies its parts into one tensor. Adjacent parts, as from
    `regard.kernels.short_sequences`, are one tensor already.

    >>> queries, keys = split_heads(torch.ones(2, 5, 4, 8), [3, 1])
    >>> queries.shape, keys.shape
    (torch.Size([2, 5, 3, 8]), torch.Size([2, 5, 1, 8]))
    """
    is_plain = type(heads) is Tensor and may_be_kept(heads) and not in_forward_mode()
    if len(counts) > 1 and is_recorded() and heads.requires_grad and is_plain:
        return list(_Split.apply(heads, tuple(counts)))
    return list(heads.split_with_sizes(list(counts), dim=-2))


class _Split(torch.autograd.Function):
    """`split_with_sizes` along the heads."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(heads.split_with_sizes(counts, dim=-2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A gradient with its own gradient is assembled by an operation of autograd.
        whole = None if is_recorded() else heads_together(grads)
        return torch.cat(grads, dim=-2) if whole is None else whole, None
