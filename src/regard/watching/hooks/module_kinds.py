"""Kinds of modules: those torch may run fused, and those without attention."""

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

from regard.tensors.guards import is_recorded
from regard.tensors.torch_private import has_pre_hooks
from regard.watching.readers.provenance import Traces


def forward_of(module: nn.Module) -> object:
    """The function a module's class runs as `forward`; None for a TorchScript module, whose class has none."""
    return getattr(type(module), "forward", None)


def _calls_super(function: object) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and "__class__" in code.co_freevars


TORCHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""The modules torch may run fused."""

FUSED_FORWARDS = frozenset(kind.forward for kind in TORCHS)
"""Their forward functions: a subclass with a forward of its own differs from its base."""

FUSED_SUBCLASS = (
    "torch may have run it fused, and its own forward says nothing of queries and keys: watch it with gradients on, "
    "or in train() mode, where it is not fused"
)
"""The report's reason for subclasses of torch's layers that call the forward of their base."""


def may_run_fused(module: nn.Module) -> bool:
    """True if torch may run one of `TORCHS` in one operator, which it does only without an active function mode."""
    forward = forward_of(module)
    if forward not in FUSED_FORWARDS and not _calls_super(forward):
        return False
    takes_gradients = is_recorded() and any(p.requires_grad for p in module.parameters())
    return not (module.training or takes_gradients)


PLAIN = frozenset({
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Dropout, nn.Identity, nn.Conv1d, nn.Conv2d,
    nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh, nn.Sigmoid,
})  # fmt: skip
"""Frequent modules of torch without attention. They run without our mode, which costs microseconds per function."""


HARMLESS = frozenset({
    "addmm", "bfloat16", "clamp", "clip", "dtype", "erf", "float", "float16", "float32", "functional", "gelu", "log1p",
    "mean", "nn", "pi", "pow", "relu", "rsqrt", "shape", "sigmoid", "silu", "size", "softplus", "sqrt", "square",
    "tanh", "to", "type_as", "view",
})  # fmt: skip
"""Names of functions and data in such a forward, beside those of the module itself."""
ACTIVATIONS = (F.gelu, F.silu, F.relu, F.sigmoid, F.tanh, torch.sigmoid, torch.tanh)
NAMESPACES = (torch, nn, F, math)
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


NamesRead = Mapping[str, FunctionType | None]
"""The names that a forward reads of its module; methods with their functions."""


@lru_cache(maxsize=1024)
def _names_read(kind: Any, function: object, around: tuple[object, ...] = ()) -> NamesRead | None:
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
        if step.opname == "LOAD_GLOBAL" and function.__globals__.get(step.argval) not in NAMESPACES:
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


def is_plain(module: nn.Module, traces: Traces) -> bool:
    """True for a module without observed functions, which can run without our mode. Outputs of a torch module from
    traced tensors are found afterwards; other modules from traced tensors run under our mode."""
    if type(module) not in PLAIN and (traces.alive or not works_on_positions(module)):
        return False
    return not has_pre_hooks(module) and "forward" not in module.__dict__
