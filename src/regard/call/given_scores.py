"""Scores that the caller has, masked and in the canonical shape."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.call.masks.base import Mask
from regard.call.masks.basic import as_mask
from regard.call.shapes import Sizes
from regard.errors import ShapeError


def masked_scores(scores: Any, mask: Mask | Bool[Tensor, "..."] | None) -> tuple[Float[Tensor, "B H T S"], torch.Size]:
    """Given scores with one batch and heads, -inf where the mask excludes a key; and the shape that they came in."""
    scores = _floating(scores)
    sizes = _sizes_of(scores)
    flat = scores.reshape(sizes.flat_batch, sizes.heads, sizes.queries, sizes.keys)
    if (given := as_mask(mask)) is not None:
        bound = given.bind(sizes, scores.device)
        rows, columns = range(sizes.queries), range(sizes.keys)
        flat = flat.masked_fill(~bound.block(rows, columns, sizes=sizes, device=scores.device), -torch.inf)
    return flat, scores.shape


def _floating(scores: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(scores)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"scores must be a tensor, an array or lists of real numbers; {error}") from None
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise ShapeError(f"scores must be real numbers, got {tensor.dtype}")
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


def _sizes_of(scores: Tensor) -> Sizes:
    if scores.dim() < 2:
        raise ShapeError(f"scores must have the shape (..., queries, keys), got {tuple(scores.shape)}")
    *leading, queries, keys = scores.shape
    has_heads = len(leading) > 1
    heads = leading.pop() if has_heads else 1
    return Sizes(tuple(leading), heads, heads, queries, keys, has_heads)
