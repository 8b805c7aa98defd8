"""Map over the tensors in the frozen dataclasses of a call."""

from collections.abc import Callable
from dataclasses import fields
from operator import is_
from typing import Any

from torch import Tensor

UNSAVED = {"is_saved": False}
"""The metadata of a field that no file holds: a loaded object has its default."""


def tensors_mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The tree with changed tensors; a part without any is the same object, since making anew takes microseconds."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        parts = tuple([tensors_mapped(part, change) for part in tree])
        return tree if all(map(is_, parts, tree)) else parts
    changed = {}
    for name in getattr(type(tree), "__dataclass_fields__", ()):
        value = getattr(tree, name)
        mapped = tensors_mapped(value, change)
        if mapped is not value:
            changed[name] = mapped
    if not changed:
        return tree
    return rebuilt(type(tree), {f.name: getattr(tree, f.name) for f in fields(tree)} | changed)


def tensors_of_tree(*trees: Any) -> list[Tensor]:
    found: list[Tensor] = []
    waiting = [*reversed(trees)]  # A loop, for speed: each call of attention with a map comes here.
    while waiting:
        tree = waiting.pop()
        if isinstance(tree, Tensor):
            found.append(tree)
        elif isinstance(tree, tuple):
            waiting += reversed(tree)
        elif (names := getattr(type(tree), "__dataclass_fields__", None)) is not None:
            for name in reversed(names):
                waiting.append(getattr(tree, name))
    return found


def rebuilt(kind: type, values: dict[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
