"""Compiled functions on several threads, by torch's own OpenMP threads if possible.

OpenMP's threads spin for a while after an operation, so other threads would compete with them for the processor.
`GOMP_parallel` starts them from code compiled by gcc, and LLVM's OpenMP has it too. The fallback is Python's threads.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any


def run_in_threads(function: Any, argument: int, threads: int) -> None:
    """Call a compiled function in several threads, and wait for all of them.

    Its `address` is that of a C function of one pointer, the argument. It divides its work itself, so fewer threads
    give the same result. This thread is one of them.
    """
    team = openmp() if threads > 1 else None
    if team is not None:
        team(function.address, argument, threads, 0)
        return
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.address)
    if threads == 1:
        called(argument)
    else:
        with ThreadPoolExecutor(threads - 1) as pool:
            others = [pool.submit(called, argument) for _ in range(threads - 1)]
            called(argument)
        for other in others:
            other.result()


@cache
def openmp() -> Any:
    """The function of torch's OpenMP that starts its threads; None if it is absent."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return found
