"""Compiled functions run by several threads at once: by those that torch's own operations use, where that is known.

After an operation, the threads of OpenMP go on spinning for a while, ready for the next one; other threads would have
to share the processor with them. `GOMP_parallel` is how code that gcc compiled starts them, and LLVM's OpenMP has it
too. Where it is not found, threads of Python run the function.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any


def run_in_threads(function: Any, argument: int, threads: int) -> None:
    """Call a compiled function of one pointer in each of several threads, and wait for all of them.

    Args:
        function: has the `address` of a C function, such as a `numba.cfunc`. It shares its work out itself, so that
            the result is the same with fewer threads.
        argument: the pointer.
        threads: how many threads call it, this one among them.
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
    """The function of torch's OpenMP that starts its threads; None if it is not found."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return found
