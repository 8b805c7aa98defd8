"""An action on each layer of a stack as soon as it is made, before the next layer is made."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

_given_to: ContextVar[Callable[[nn.Module], object] | None] = ContextVar("_given_to", default=None)


@contextmanager
def each_layer_given_to(act: Callable[[nn.Module], object]) -> Iterator[None]:
    """In this context, `act` is called with every layer of every stack of a model, one layer after the other.

    If each layer is divided among the ranks at once, it needs no memory while the next layer is made.

    >>> with each_layer_given_to(lambda layer: layer.requires_grad_(False)):
    ...     stack = stack_of(2, lambda: nn.Linear(1, 1))
    >>> any(weight.requires_grad for weight in stack.parameters())
    False
    """
    token = _given_to.set(act)
    try:
        yield
    finally:
        _given_to.reset(token)


def stack_of(num_layers: int, make: Callable[[], nn.Module]) -> nn.ModuleList:
    """Make `num_layers` layers. Inside `each_layer_given_to`, its `act` is called with each of them."""
    act, stack = _given_to.get(), nn.ModuleList()
    for _ in range(num_layers):
        layer = make()
        if act is not None:
            act(layer)
        stack.append(layer)
    return stack
