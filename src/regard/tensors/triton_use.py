"""Where the kernels that are written in Triton run: on CUDA, and on the CPU where Triton interprets its programs.

Triton comes with the builds of torch for CUDA; it is imported when the first kernel is asked for. With
TRITON_INTERPRET=1 in the environment it runs every program step by step on tensors of the CPU, which shows whether they
are right, and takes very long.
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
"""The kernels that could not be built or started here: they are not tried again."""


@cache
def has_triton() -> bool:
    """Whether Triton is there; it is not imported."""
    return find_spec("triton") is not None


def runs_triton(device: torch.device, kernel: str) -> bool:
    """Whether a kernel of this name runs on a device.

    >>> runs_triton(torch.device("meta"), "statistics")
    False
    """
    # A function that keeps its answer cannot be traced, so that compiling is asked about first.
    if is_compiling() or not has_triton() or kernel in _FAILED:
        return False
    if device.type == "cuda":
        return (capability_of(device) or (0, 0)) >= (8, 0)
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def or_else(kernel: str, run: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """What a kernel gives; if it cannot be built or started on this machine, what takes its place, with a warning."""
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Triton and the driver have no exception in common; the interpreter is here to show what is wrong.
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
