"""The operators of torch that a call runs, counted at the dispatcher."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero"}
"""Operators that wait for their device."""


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        self.seen[function.overloadpacket.__name__] += 1
        return function(*given, **(named or {}))


def operators_of(run: Callable[[], object]) -> Counter[str]:
    with _Counting() as counting:
        run()
    return counting.seen
