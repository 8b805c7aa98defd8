"""Map over the tensors in the frozen dataclasses of a call."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

UNSAVED = {"is_saved": False}
"""The metadata of a field that no file holds: a loaded object has its default."""


def tensors_mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(tensors_mapped(part, change) for part in tree)
    if not is_dataclass(tree) or isinstance(tree, type):
        return tree
    values = {f.name: getattr(tree, f.name) for f in fields(tree)}
    changed = {name: tensors_mapped(value, change) for name, value in values.items()}
    if all(changed[name] is values[name] for name in values):
        return tree
    return rebuilt(type(tree), changed)


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
