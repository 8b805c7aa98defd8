"""Classes whose forward works on each position alone, told by its code: norms, activations and projections.

Such a forward takes one tensor, calls functions of a list and methods of its own that do the same, and multiplies no
matrices by `@`. A frequent module without children that does so need not run under our mode, which costs microseconds
for each function.
"""

import dis
import inspect
import math
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HARMLESS = frozenset({
    "addmm", "bfloat16", "clamp", "clip", "dtype", "erf", "float", "float16", "float32", "functional", "gelu", "log1p",
    "mean", "nn", "pi", "pow", "relu", "rsqrt", "shape", "sigmoid", "silu", "size", "softplus", "sqrt", "square",
    "tanh", "to", "type_as", "view",
})  # fmt: skip
"""Names of functions and data in such a forward, beside those of the module itself."""
ACTIVATIONS = (F.gelu, F.silu, F.relu, F.sigmoid, F.tanh, torch.sigmoid, torch.tanh)
MODULES = (torch, nn, F, math)
DATA = (Tensor, int, float, str, torch.dtype, torch.Size, tuple, type(None))


def works_on_positions(module: nn.Module) -> bool:
    """True for a module without children whose forward works on each position alone.

    >>> from torch import nn
    >>> class Norm(nn.Module):
    ...     def forward(self, x):
    ...         return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    >>> class Attend(nn.Module):
    ...     def forward(self, x):
    ...         return (x @ x.mT).softmax(-1) @ x
    >>> works_on_positions(Norm()), works_on_positions(Attend())
    (True, False)
    """
    kind: Any = type(module)
    own = _names_read(kind, getattr(kind, "forward", None))
    if own is None or next(module.children(), None) is not None:
        return False
    return all(_is_harmless(module, getattr(module, name, module), method) for name, method in own.items())


def _is_harmless(module: nn.Module, one: object, method: FunctionType | None) -> bool:
    """True for data, for an activation, or for a method whose code was read."""
    is_read = isinstance(one, MethodType) and one.__self__ is module and one.__func__ is method
    return isinstance(one, DATA) or is_read or any(one is known for known in ACTIVATIONS)


Names = Mapping[str, FunctionType | None]
"""The names that a forward reads of its module; methods with their functions."""


@lru_cache(maxsize=1024)
def _names_read(kind: Any, function: object, around: tuple[object, ...] = ()) -> Names | None:
    """The names that a function of a class reads of its module; None for one that may do other things."""
    function = inspect.unwrap(function) if callable(function) else None
    if not isinstance(function, FunctionType) or function in around:
        return None
    code, own = function.__code__, dict[str, FunctionType | None]()
    stars = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    if code.co_freevars or code.co_kwonlyargcount or stars or code.co_argcount != 2:
        return None
    if any(isinstance(one, CodeType) for one in code.co_consts):
        return None
    for step in dis.get_instructions(code):
        if step.opname == "BINARY_OP" and "@" in step.argrepr:
            return None
        if step.opname == "LOAD_GLOBAL" and function.__globals__.get(step.argval) not in MODULES:
            return None
        if step.opname.startswith("IMPORT"):
            return None
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval not in HARMLESS:
            method = getattr(kind, step.argval, None)
            own[step.argval] = method if isinstance(method, FunctionType) else None
            if isinstance(method, FunctionType):
                inner = _names_read(kind, method, (*around, function))
                if inner is None:
                    return None
                own |= inner
    return own
