"""Weights of scores that the caller has: the masked softmax of the textbooks, and every other normalization."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.call.masks.base import Mask, render
from regard.call.masks.basic import as_mask
from regard.call.shapes import Sizes
from regard.errors import ShapeError

if TYPE_CHECKING:
    from regard.call.normalizations import Normalization


def normalized(
    normalization: "Normalization", scores: Any, mask: Mask | Bool[Tensor, "..."] | None
) -> Float[Tensor, "..."]:
    """The weights of whole rows of scores, with the errors of `masked_softmax`."""
    scores = _floating(scores)
    sizes = _sizes_of(scores)
    flat = scores.reshape(sizes.flat_batch, sizes.heads, sizes.queries, sizes.keys)
    if (given := as_mask(mask)) is not None:
        bound = given.bind(sizes, scores.device)
        rows, columns = range(sizes.queries), range(sizes.keys)
        flat = flat.masked_fill(~render(bound, rows, columns, sizes=sizes, device=scores.device), -torch.inf)
    weights, _ = normalization.finish(*normalization.base.normalize(flat))
    return weights.reshape(scores.shape)


def masked_softmax(
    scores: Tensor | npt.NDArray[Any] | Sequence[Any], mask: Mask | Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "*leading T S"]:
    r"""$P_{ij} = \exp(s_{ij}) / \sum_{l} \exp(s_{il})$, l and j over the keys that the mask allows; else exactly 0.

    It is `Softmax()(scores, mask)`; the other normalizations are called the same way.

    Args:
        scores: (T, S), (batch, T, S) or (batch..., heads, T, S): a tensor, an array or lists of real numbers.
        mask: a mask (`causal()`, `lengths(n)`) or a bool tensor, True = keep; None for all keys.

    Returns:
        Weights of the same shape. Each row sums to 1; a row without keys is exactly 0.

    Raises:
        ShapeError: the scores are not real numbers of two or more dimensions, or the mask does not fit.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.3.

    >>> from regard.call.masks import lengths
    >>> masked_softmax([[[0.0, 0.0, 5.0]], [[0.0, 0.0, 0.0]]], lengths(torch.tensor([2, 3]))).squeeze(1)
    tensor([[0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    from regard.call.normalizations import Softmax

    return normalized(Softmax(), scores, mask)


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
