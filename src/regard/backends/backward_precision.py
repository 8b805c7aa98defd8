"""The precision in which the CPU kernel's backward of half-precision tensors takes less time."""

from collections.abc import Callable
from functools import cache
from math import prod
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.mechanisms.guards import may_be_kept
from regard.torch_private import flash_cpu, flash_cpu_backward

if TYPE_CHECKING:
    from regard.storage.choices import Choices

SHORT = 256
"""Up to so many queries float32 takes less time on every processor that was asked (docs/design/choices.md)."""
TIMED = (1, 1, 512, 64)
"""The shape of the tensors that are timed. Beyond SHORT the processor decides which way wins, and not the length."""
_LOCK = Lock()
"""One thread at a time asks, so that none is timed beside another."""


def goes_in_float32(query: Tensor) -> bool:
    """Whether float32 takes less time for the backward, its conversions included.

    Short blocks always go in float32. For longer ones the machine is asked once for each dtype, by one thread in some
    20 ms, and what it answered is kept (`regard.storage.choices`). Where a graph is recorded, in a dispatch mode, and
    where nothing may be measured or kept, they go in their own dtype.

    >>> goes_in_float32(torch.ones(1, 1, 8, 4, dtype=torch.bfloat16)), goes_in_float32(torch.ones(1, 1, 8, 4))
    (True, False)
    """
    if query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if query.shape[-2] <= SHORT:
        return True
    return may_be_kept(query) and _float32_takes_less_time(query.dtype)


@cache
def _float32_takes_less_time(dtype: torch.dtype) -> bool:
    from regard.storage.choices import BUDGET_S, choices  # (most processes never ask)

    found = choices()
    with _LOCK:
        found.allow(BUDGET_S)
        threads = torch.get_num_threads()
        # One thread, which other programs on the machine disturb least: two wait for one another at each of many steps.
        torch.set_num_threads(1)
        try:
            _fastest(found, dtype)
        finally:
            torch.set_num_threads(threads)
        found.keep()
        # An answer that cannot be kept may be another one in the process that resumes a training. And what another
        # process has written meanwhile counts.
        return found.path is not None and _fastest(found, dtype) == "float32"


def _fastest(found: "Choices", dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    # No random numbers: the caller's would be others after a backward that measures.
    numbers = torch.linspace(-1, 1, prod(TIMED), dtype=torch.float32, device="cpu")
    x = numbers.view(TIMED).to(dtype)
    output, lse = flash_cpu(x, x, x, 0.0, False, scale=0.125)
    tensors = (x, x, x, x, output, lse)
    ways = {
        name: lambda: _backward(tensors, dtype),
        "float32": lambda: _backward(tensors, torch.float32),
    }
    return found.fastest(f"attention backward of {name}, more than {SHORT} queries, threads: 1", ways, x)


def _backward(tensors: tuple[Tensor, ...], computed: torch.dtype) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        given = tuple(t.to(computed) for t in tensors[:-1])
        grads = flash_cpu_backward(*given, tensors[-1], 0.0, False, scale=0.125)
        query_grad, _, _ = (grad.to(x.dtype) for grad in grads)
        return query_grad

    return run
