"""A function between compiled graphs.

This module is imported by graphs only, because torch.compiler.disable loads the compiler.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


@torch.compiler.disable(reason="regard's tiled backend unrolls few tiles into a graph; many run between graphs")  # type: ignore[untyped-decorator]
def ungraphed(function: Callable[Arguments, Answer], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
    return function(*args, **kwargs)
