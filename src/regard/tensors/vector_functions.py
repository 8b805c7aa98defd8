"""The first call of each vector function of torch, made by one thread.

On the CPU torch computes exp, log, tanh and the like by MKL's vector functions. MKL selects the code of a function at
its first call. In the release of torch's wheels (2024.2), two threads in this first call may get code of low accuracy
for this one call: in one of a hundred processes a map's weights had relative errors of 1.5e-4, and were right when
computed again (https://github.com/pytorch/pytorch/issues/188792). Later calls are right.
"""

from functools import cache
from threading import Thread

import torch

ROUTED = (
    *("exp", "log", "log2", "log10", "sqrt", "trunc"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "tanh"),
    *("erf", "erfc", "erfinv"),
)
"""The functions torch dispatches to MKL (`aten/src/ATen/cpu/vml.h`)."""


@cache
def settle_vector_functions() -> None:
    """Call each function once, in float32 and float64; a few milliseconds a process.

    A new thread does it, free of the caller's modes: a graph under recording, fake tensors, a default device.

    >>> settle_vector_functions()
    """
    thread = Thread(target=_call_each, name="regard-vector-functions")
    try:
        thread.start()
    except RuntimeError:  # No new threads at exit or at the limit of threads.
        _call_each()
    else:
        thread.join()


def _call_each() -> None:
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in ROUTED:
            getattr(torch, name)(number)
