"""Classes whose forward works on each position alone, told by its code: norms, activations and projections.

Such a forward takes one tensor, calls functions of a list and methods of its own that do the same, and multiplies no
matrices by `@`. A frequent module without children that does so need not run under our mode, which costs microseconds
for each function.
"""

import dis
import inspect
import math
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
    own = _own_names(type(module))
    if own is None or next(module.children(), None) is not None:
        return False
    return all(_is_harmless(module, name, getattr(module, name, module)) for name in own)


def _is_harmless(module: nn.Module, name: str, one: object) -> bool:
    """True for data, for an activation, or for a method whose code was read."""
    is_read = isinstance(one, MethodType) and one.__self__ is module and name not in vars(module)
    return isinstance(one, DATA) or is_read or any(one is known for known in ACTIVATIONS)


@lru_cache(maxsize=1024)
def _own_names(kind: Any) -> frozenset[str] | None:
    """The names that the forward of a class reads of its module; None for a forward that may do other things."""
    return _read(getattr(kind, "forward", None), kind, ())


def _read(function: object, kind: object, around: tuple[object, ...]) -> frozenset[str] | None:
    function = inspect.unwrap(function) if callable(function) else None
    if not isinstance(function, FunctionType) or function in around:
        return None
    code, own = function.__code__, set[str]()
    has_more = (
        code.co_freevars or code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    )
    if has_more or code.co_argcount != 2 or any(isinstance(one, CodeType) for one in code.co_consts):
        return None
    for step in dis.get_instructions(code):
        if step.opname == "BINARY_OP" and "@" in step.argrepr:
            return None
        if step.opname == "LOAD_GLOBAL" and function.__globals__.get(step.argval) not in MODULES:
            return None
        if step.opname.startswith("IMPORT"):
            return None
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            continue
        if isinstance(method := getattr(kind, step.argval, None), FunctionType) and step.argval not in HARMLESS:
            inner = _read(method, kind, (*around, function))
            if inner is None:
                return None
            own |= {step.argval, *inner}
        elif step.argval not in HARMLESS:
            own.add(step.argval)
    return frozenset(own)
