"""The arguments of torch's kernels for a call: tensors of one width, the factors of its mask, a scale."""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.call.masks.base import Mask
from regard.call.masks.basic import Causal
from regard.kernels.base import Call


def one_width(*tensors: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Tensors (..., D), zero-padded to the greatest width, rounded up to a multiple of `multiple`.

    Zero columns change neither the scores nor the other columns of the output.

    >>> [tuple(t.shape) for t in one_width(torch.ones(2, 3), torch.ones(2, 5), multiple=4)]
    [(2, 8), (2, 8)]
    """
    width = max(t.shape[-1] for t in tensors)
    width += -width % multiple
    return tuple(t if t.shape[-1] == width else torch.nn.functional.pad(t, (0, width - t.shape[-1])) for t in tensors)


def causal_offset(mask: Mask) -> int | None:
    """The offset of a causal mask: query i sees the keys up to i + offset.

    None for other masks, and for causal ones with an offset for each sequence.
    """
    if not isinstance(mask, Causal) or not isinstance(mask.offset, int | torch.SymInt):
        return None
    return mask.offset


def excluding_factors(call: Call) -> tuple[Mask, ...]:
    """The factors of a call's mask, without causal ones that exclude nothing.

    An example is the causal mask of a decoding step: its only query sees every key.
    """
    if call.mask is None:
        return ()
    last, found = call.sizes.keys - 1, []
    for factor in call.mask.factors():
        offset = causal_offset(factor)
        if offset is None or offset < last:
            found.append(factor)
    return tuple(found)


def kernel_tensors(
    query: Tensor, key: Tensor, value: Tensor, scale: float, multiple: int, lay_out: Callable[..., tuple[Tensor, ...]]
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Query, key, value and scale as a kernel takes them: of one dtype and width, laid out in memory, scale above 0.

    >>> tensors = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 5)
    >>> query, key, value, scale = kernel_tensors(*tensors, -0.5, 8, lambda *laid_out: laid_out)
    >>> query.shape, value.shape, scale
    (torch.Size([2, 8]), torch.Size([4, 8]), 0.5)
    """
    dtype, width = query.dtype, query.shape[-1]
    if key.dtype != dtype or value.dtype != dtype:
        key, value = key.to(dtype), value.to(dtype)
    if value.shape[-1] != width or key.shape[-1] != width or (multiple > 1 and width % multiple):
        query, key, value = one_width(query, key, value, multiple=multiple)
    if scale <= 0:
        query, scale = with_positive_scale(query, scale)
    # Last, because the negative of a tensor may have another memory layout.
    query, key, value = lay_out(query, key, value)
    return query, key, value, scale


def with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """A query and a positive scale with the same scores: the query is multiplied by the sign of the scale, or by 0.

    torch's kernels give an excluded key the score -inf and multiply by the scale afterwards. With a scale of 0 or
    below, an excluded key would get NaN or the largest score (torch 2.13, `is_causal=True` on the CPU).
    """
    if scale > 0:
        return query, scale
    return (-query, -scale) if scale < 0 else (query * 0.0, 1.0)
