"""The first call of each vector function of torch, made by one thread before two can make it.

torch computes exp, log, tanh and their like of float32 and float64 numbers on the processor by vector functions of MKL.
MKL looks for the fitting code of a function when it is first called. In the release that torch's wheels hold (2024.2),
two threads that make this first call together may find code of low accuracy, each for its own part of that one call.
A map then had weights that were wrong by 1.5e-4 of themselves, in one of a hundred processes, and was right when it was
asked again (https://github.com/pytorch/pytorch/issues/188792). No later call is ever wrong.
"""

from functools import cache
from threading import Thread

import torch

ROUTED = (
    *("exp", "log", "log2", "log10", "sqrt", "trunc"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "tanh"),
    *("erf", "erfc", "erfinv"),
)
"""The functions that torch hands to MKL (`aten/src/ATen/cpu/vml.h`)."""


@cache
def settle_vector_functions() -> None:
    """Call each function with one number, in float32 and in float64; once in a process, for a few milliseconds.

    A thread of its own does it, since that has none of the modes in which the caller may be: a graph that is being
    recorded, tensors without numbers, a default device.

    >>> settle_vector_functions()
    """
    thread = Thread(target=_call_each, name="regard-vector-functions")
    try:
        thread.start()
    except RuntimeError:  # A process that is ending, or has as many threads as it may have, gets no other.
        _call_each()
    else:
        thread.join()


def _call_each() -> None:
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in ROUTED:
            getattr(torch, name)(number)
