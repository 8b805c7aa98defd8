"""The subject of a sequence of calls: a module that attends, and its changeable parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass
class Life:
    read: Callable[[], Tensor]
    output: Tensor
    leaves: Sequence[Tensor] = ()


@dataclass
class Subject:
    name: str
    run: Callable[[], Life]
    parameters: list[nn.Parameter] = field(default_factory=list)
    """Stepped by optimizers, written to through `.data`, replaced."""
    tensors: list[Tensor] = field(default_factory=list)
    """Written to in place: masks, lengths, frozen biases, buffers, caches."""
    variables: list[Callable[[], Any]] = field(default_factory=list)
    """Each changes something that is no tensor: a loop variable, a mode."""
    modules: list[nn.Module] = field(default_factory=list)
    """Loaded, cast, moved."""
