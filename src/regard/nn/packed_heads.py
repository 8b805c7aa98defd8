"""Heads that one product made, taken apart; their gradients come back without a copy if they stand side by side."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.backends.side_by_side import heads_together
from regard.mechanisms.guards import in_forward_mode, may_be_kept


def split_heads(heads: Float[Tensor, "... H D"], counts: Sequence[int]) -> list[Tensor]:
    """Split the heads of one product into parts of so many heads: those of queries, keys and values.

    The gradient of torch's own `split` copies its parts into one tensor. Where a kernel writes them side by side, as
    `regard.backends.short_sequences` does, they are one tensor already.

    >>> queries, keys = split_heads(torch.ones(2, 5, 4, 8), [3, 1])
    >>> queries.shape, keys.shape
    (torch.Size([2, 5, 3, 8]), torch.Size([2, 5, 1, 8]))
    """
    is_plain = type(heads) is Tensor and may_be_kept(heads) and not in_forward_mode()
    if len(counts) > 1 and torch.is_grad_enabled() and heads.requires_grad and is_plain:
        return list(_Split.apply(heads, tuple(counts)))
    return list(heads.split_with_sizes(list(counts), dim=-2))


def own_heads(
    x: Float[Tensor, "B T M"], weight: Float[Tensor, "W M"], bias: Float[Tensor, " W"] | None, counts: Sequence[int],
    dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values (B, heads, T, D) of self-attention by one product, without gradients.

    >>> query, key, _ = own_heads(torch.ones(2, 5, 3), torch.ones(48, 3), None, [2, 2, 2], 8)
    >>> query.shape, key.shape
    (torch.Size([2, 2, 5, 8]), torch.Size([2, 2, 5, 8]))
    """
    heads = nn.functional.linear(x, weight, bias).view(x.shape[0], x.shape[1], -1, dim).transpose(1, 2)
    query, key, value = heads.split_with_sizes(list(counts), 1)
    return query, key, value


def heads_of_both(
    x: Float[Tensor, "B T M"], y: Float[Tensor, "B S M"], weight: Float[Tensor, "W M"],
    bias: Float[Tensor, " W"] | None, counts: Sequence[int], dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries (B, heads, T, D) of x, and keys and values (B, heads, S, D) of y, by two products, without gradients.

    >>> query, key, _ = heads_of_both(torch.ones(2, 5, 3), torch.ones(2, 4, 3), torch.ones(48, 3), None, [2, 2, 2], 8)
    >>> query.shape, key.shape
    (torch.Size([2, 2, 5, 8]), torch.Size([2, 2, 4, 8]))
    """
    first = counts[0] * dim
    of_x, of_y = (None, None) if bias is None else (bias[:first], bias[first:])
    query = nn.functional.linear(x, weight[:first], of_x).view(x.shape[0], x.shape[1], -1, dim).transpose(1, 2)
    others = nn.functional.linear(y, weight[first:], of_y).view(y.shape[0], y.shape[1], -1, dim).transpose(1, 2)
    key, value = others.split_with_sizes(list(counts[1:]), 1)
    return query, key, value


class _Split(torch.autograd.Function):
    """`split_with_sizes` along the heads."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(heads.split_with_sizes(counts, dim=-2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A gradient that is to be differentiated again is put together by an operation that autograd knows.
        whole = None if torch.is_grad_enabled() else heads_together(grads)
        return torch.cat(grads, dim=-2) if whole is None else whole, None
