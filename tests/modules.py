"""Small modules of tests, each written as what it computes and the parts that it holds."""

from collections.abc import Callable
from typing import Any

from torch import nn


def module(forward: Callable[..., Any], parts: Callable[[], dict[str, Any]] = dict) -> type[Any]:
    """A class of modules: `module(lambda m, x: m.inner(x), lambda: {"inner": nn.Linear(2, 2)})`."""

    def made(self: Any) -> None:
        nn.Module.__init__(self)
        for name, part in parts().items():
            setattr(self, name, part)

    return type("Made", (nn.Module,), {"__init__": made, "forward": forward})
