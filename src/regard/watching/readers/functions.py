"""The one name of a function torch, its tensors and its operators offer under several."""

from collections.abc import Callable
from typing import Any

from regard.tensors.torch_private import OpOverload, qualified_name

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
"""A function that a model calls, and its arguments by place and by name."""

OWN = frozenset({"aten", "prims", "prim"})
"""The operator namespaces of torch's own functions."""

ALIASES = {
    "__matmul__": "matmul", "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul", "multiply": "mul",
    "__truediv__": "div", "__itruediv__": "div", "divide": "div", "true_divide": "div",
    "__sub__": "sub", "__isub__": "sub", "subtract": "sub", "__add__": "add", "__radd__": "add", "__iadd__": "add",
    "_softmax": "softmax", "_safe_softmax": "softmax", "special_softmax": "softmax", "softmin": "softmax",
    "_log_softmax": "log_softmax", "special_log_softmax": "log_softmax", "special_logsumexp": "logsumexp",
}  # fmt: skip


IN_PLACE = frozenset({"__imul__", "__itruediv__", "__isub__", "__iadd__"})


def name_of(func: Any) -> str:
    """The name of a function, common to method, function and operator.

    >>> import torch
    >>> [name_of(f) for f in (torch.bmm, torch.Tensor.div_, torch.Tensor.T.__get__, torch.ops.aten._softmax.default)]
    ['bmm', 'div', 'T', 'softmax']
    """
    name = _plain_name(func)
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return ALIASES.get(name, name)


def is_in_place(func: Any) -> bool:
    name = _plain_name(func)
    return (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE


def _plain_name(func: Any) -> str:
    if isinstance(func, OpOverload):
        return str(qualified_name(func)).partition("::")[2]
    name: str = getattr(func, "__name__", "")
    # A property of a tensor, such as its transpose, arrives as the `__get__` of the property.
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name


def namespace_of(func: Any) -> str | None:
    """The namespace of an operator (`torch.ops.NAMESPACE.name`); None for other functions."""
    name = qualified_name(func)
    return None if name is None else name.partition("::")[0]
