"""Where Triton kernels run: on CUDA, and on the CPU under Triton's interpreter.

Triton comes with the CUDA builds of torch and is imported by the first kernel. TRITON_INTERPRET=1 in the environment
runs its programs on CPU tensors: a very slow test of correctness.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.tensors.guards import is_compiling

T = TypeVar("T")
current_device = torch.cuda.current_device
_FAILED: set[str] = set()


@cache
def has_numba() -> bool:
    return find_spec("numba") is not None


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(device: torch.device, kernel: str) -> bool:
    # A cached function cannot be traced: check for compiling first.
    if is_compiling() or not has_triton() or kernel in _FAILED:
        return False
    if device.type == "cuda":
        return (capability_of(device) or (0, 0)) >= (8, 0)
    return device.type == "cpu" and is_interpreted()


def card_of(device: torch.device) -> tuple[int, int]:
    """The compute capability for which programs are made; the interpreter takes those of any."""
    return capability_of(device) or (9, 0)


def or_else(kernel: str, run: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """The result of a kernel; with a warning, of its fallback if the kernel fails to build or start here."""
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Triton and the driver have no common exception; the interpreter shows its errors.
        if is_interpreted():
            raise
        _FAILED.add(kernel)
        warnings.warn(
            f"the Triton kernel for {kernel} does not run on this machine, and torch's operators take its place, "
            f"which is slower: {type(error).__name__}: {str(error)[:200]}",
            RuntimeWarning,
            stacklevel=2,
        )
        return otherwise()


class Launch:
    """One launch of a program with its numbers and constants, for tensors of one shape.

    Triton's own launch looks at each argument anew, which takes longer than a small kernel. Here the compiled kernel is
    kept for each device and each alignment of the tensors: of these two, and of the numbers, Triton decides its code.
    """

    def __init__(self, program: Any, grid: tuple[int, int], named: Mapping[str, Any], warps: int) -> None:
        self.program, self.grid, self.warps = program, (*grid, 1), warps
        self.names = [name for name in program.arg_names if name not in named]
        self.rest = [named[name] for name in program.arg_names if name in named]
        assert self.names == program.arg_names[: len(self.names)], "tensors come first"
        self.kept: dict[tuple[int, ...], Any] = {}
        """The compiled kernels."""

    def __call__(self, tensors: Mapping[str, Tensor]) -> None:
        given = [tensors[name] for name in self.names]
        if is_interpreted():
            self.program[self.grid](*given, *self.rest)
            return
        device = given[0].device
        index = device.index or 0
        if index == current_device():
            self._launch(index, given)
            return
        with torch.cuda.device(device):
            self._launch(index, given)

    def _launch(self, index: int, given: list[Tensor]) -> None:
        key = (index, *(tensor.data_ptr() % 16 for tensor in given))
        kernel = self.kept.get(key)
        if kernel is None:
            kernel = self.program.warmup(*given, *self.rest, grid=self.grid, num_warps=self.warps)
            self.kept[key] = kernel
        kernel[self.grid](*given, *self.rest)


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device; None before CUDA starts, as under `FakeTensorMode`."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return None
    return torch.cuda.get_device_capability(device)
