"""Whether compiled code may run on tensors: numba is installed, and their memory is readable."""

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def is_installed() -> bool:
    return find_spec("numba") is not None


def row_contiguous(tensor: Tensor) -> Tensor:
    """A tensor (..., D) with contiguous rows without overlap: itself or a copy.

    Kernels take it for granted. torch's CPU kernel lays its output out like the queries; for overlapping queries, whose
    last dimension may not be the last in memory, it silently returns wrong values.

    >>> import torch
    >>> row_contiguous(torch.ones(3, 2).mT).stride(), row_contiguous(torch.ones(4).as_strided((3, 2), (1, 1))).stride()
    ((3, 1), (2, 1))
    """
    *others, last = tensor.stride()
    if last != 1:
        return tensor.contiguous()
    width = tensor.shape[-1]
    for size, stride in zip(tensor.shape, others, strict=False):
        if 0 < stride < width and size > 1:
            return tensor.contiguous()
    return tensor
