"""Whether kernels and compiled code may be called on tensors: numba is installed, and their memory can be read."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from regard.mechanisms.guards import can_look, is_its_memory

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes that the compiled loops of training know."""


PLAIN = (Tensor, torch.nn.Parameter)
"""The classes whose products are torch's own."""


@cache
def is_installed() -> bool:
    """Whether numba is there; it is not imported."""
    return find_spec("numba") is not None


def is_readable(*tensors: Tensor) -> bool:
    """Whether the numbers of these tensors stand in the memory of the CPU, and may be read now.

    A tensor of another class may have products of its own, and a recorded graph would not see what is read.

    >>> is_readable(torch.ones(2)), is_readable(torch.ones(2, device="meta"))
    (True, False)
    """
    # Whether there are values depends on nothing else that differs between plain tensors.
    is_run = not tensors or (type(tensors[0]) in PLAIN and can_look(tensors[0]))
    return is_run and all(type(t) in PLAIN and is_its_memory(t) for t in tensors)


def row_contiguous(tensor: Tensor) -> Tensor:
    """A tensor (..., D) whose last numbers follow one another in memory: the same one, or a copy.

    Kernels take it for granted. The CPU kernel of torch gives wrong numbers without a word where it is not so.

    >>> row_contiguous(torch.ones(3, 2).mT).stride()
    (3, 1)
    """
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
