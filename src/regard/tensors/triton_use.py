"""Where Triton kernels run: on CUDA, and on the CPU under Triton's interpreter.

Triton comes with the CUDA builds of torch and is imported by the first kernel. TRITON_INTERPRET=1 in the environment
runs its programs on CPU tensors: a very slow test of correctness.
"""

import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TypeVar

import torch

from regard.tensors.devices import capability_of
from regard.tensors.guards import is_compiling

T = TypeVar("T")
_FAILED: set[str] = set()
"""Kernels that failed to build or start here: they are not tried again."""


@cache
def has_triton() -> bool:
    """Whether Triton is installed, without importing it."""
    return find_spec("triton") is not None


def runs_triton(device: torch.device, kernel: str) -> bool:
    """Whether a kernel can run on a device.

    >>> runs_triton(torch.device("meta"), "statistics")
    False
    """
    # A cached function cannot be traced: check for compiling first.
    if is_compiling() or not has_triton() or kernel in _FAILED:
        return False
    if device.type == "cuda":
        return (capability_of(device) or (0, 0)) >= (8, 0)
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def or_else(kernel: str, run: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """The result of a kernel; with a warning, of its fallback if the kernel fails to build or start here."""
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Triton and the driver have no common exception; the interpreter shows its errors.
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise
        _FAILED.add(kernel)
        warnings.warn(
            f"the Triton kernel for {kernel} does not run on this machine, and torch's operators take its place, "
            f"which is slower: {type(error).__name__}: {str(error)[:200]}",
            RuntimeWarning,
            stacklevel=2,
        )
        return otherwise()
