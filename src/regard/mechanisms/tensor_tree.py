"""Change the tensors inside the frozen objects that describe a call."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tuples and dataclasses with every tensor changed."""
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


def tensors_of_tree(tree: Any) -> Iterator[Tensor]:
    """Every tensor in tuples and dataclasses.

    >>> import torch
    >>> from regard.mechanisms.masks.basic import lengths
    >>> [tuple(one.shape) for one in tensors_of_tree((torch.ones(2, 3), lengths(torch.tensor([3, 1])), 1.0, None))]
    [(2, 3), (2,)]
    """
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple):
        for part in tree:
            yield from tensors_of_tree(part)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from tensors_of_tree(getattr(tree, field.name))


def rebuilt(kind: type, values: dict[str, Any]) -> Any:
    """A dataclass made directly from the values of its fields: nothing is computed or checked again."""
    made: Any = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
