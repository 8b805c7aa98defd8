"""Whether kernels and compiled code may be called on tensors: numba is installed, and their memory can be read."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes that the compiled loops of training know."""


@cache
def is_installed() -> bool:
    """Whether numba is there; it is not imported."""
    return find_spec("numba") is not None


def row_contiguous(tensor: Tensor) -> Tensor:
    """A tensor (..., D) whose rows each stand in one piece of memory, and do not overlap: the same one, or a copy.

    Kernels take it for granted. The CPU kernel of torch gives wrong numbers without a word where it is not so: it lays
    its output out like the queries, and where these overlap their last dimension need not be the last in memory.

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
