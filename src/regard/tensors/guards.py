"""The state in which code runs: plain, recorded, compiled, traced, transformed, observed, cast. Only this file queries
it.

A public call looks once and hands the answer down. Code depends on it because a fused kernel has no forward derivative
and no vmap rule, an autograd.Function hides its backward pass from torch.func, and a cache must hold no tensors of a
graph.
"""

import sys
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function_variadic

from regard.tensors.torch_private import (
    DispatchKey,
    DispatchKeySet,
    DispatchModeKind,
    TransformType,
    count_dispatch_modes,
    dispatch_keys,
    forward_level,
    get_dispatch_mode,
    get_function_mode,
    get_function_modes,
    get_interpreter_stack,
    is_torch_function_enabled,
    is_tracing,
    level_of,
    peek_interpreter_stack,
)

NOT_ITS_MEMORY = (
    "Negative", "Conjugate", "ZeroTensor", "Functionalize", "Python", "FuncTorchBatched", "FuncTorchGradWrapper",
)  # fmt: skip
"""The dispatcher's keys of tensors without their elements in memory."""
PLAIN = (Tensor, torch.nn.Parameter)
is_compiling, is_exporting = torch.compiler.is_compiling, torch.compiler.is_exporting
is_recorded, is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
is_overridden, has_torch_functions = has_torch_function_variadic, is_torch_function_enabled
function_mode, function_modes = get_function_mode, get_function_modes

AUTOCASTS = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))


@dataclass(frozen=True, slots=True)
class State:
    is_recorded: bool
    runs_eagerly: bool = True
    """Plain code: no graph, trace, transform, tangents or dispatch modes, and plain tensors.

    Decisions from shapes may then be cached, since shapes are Python's integers.
    """
    is_compiling: bool = False
    is_traced: bool = False
    has_tangents: bool = False
    """Whether tensors may carry tangents of forward-mode differentiation."""
    is_transformed: bool = False
    is_cast: bool = False


_PLAIN = State(False), State(True)


def run_state(tensor: Tensor) -> State:
    """The state of a call of this tensor.

    >>> run_state(torch.ones(2)).runs_eagerly, run_state(torch.ones(2, device="meta")).is_recorded
    (True, True)
    """
    grad = is_recorded()
    if is_compiling():
        return State(grad, runs_eagerly=False, is_compiling=True, is_cast=is_autocasting(tensor.device.type))
    if not isinstance(tensor, Tensor):
        return _PLAIN[grad]  # The check of the arguments reports it.
    kind = tensor.device.type
    is_cast = torch.is_autocast_enabled(kind) if kind in AUTOCASTS else is_autocasting(kind)
    is_traced, is_transformed = is_tracing(), peek_interpreter_stack() is not None
    try:
        has_tangents = level_of(forward_ad) >= 0
    except AttributeError:
        has_tangents = forward_level() >= 0  # Its error names the torch versions.
    runs_eagerly = not (is_traced or is_transformed or has_tangents or count_dispatch_modes()) and type(tensor) in PLAIN
    if runs_eagerly and not is_cast:
        return _PLAIN[grad]
    return State(grad, runs_eagerly, False, is_traced, has_tangents, is_transformed, is_cast)


def is_observed() -> bool:
    return bool(count_dispatch_modes())


def is_function_observed() -> bool:
    return get_function_mode() is not None


def is_transformed() -> bool:
    return peek_interpreter_stack() is not None


def is_autocasting(kind: str) -> bool:
    """Whether autocast is on for a device type; False for types without autocast, such as `meta`."""
    # torch 2.8 cannot trace this call into a compiled graph, unless the device type was checked before.
    can = kind in AUTOCASTS or (not is_compiling() and torch.amp.is_autocast_available(kind))
    return can and torch.is_autocast_enabled(kind)


def autocasts() -> tuple[str, ...]:
    return tuple(filter(torch.is_autocast_enabled, AUTOCASTS))


def autocast_of(kind: str) -> torch.dtype | None:
    """The dtype to which autocast casts on a kind of device; None where it is off."""
    return torch.get_autocast_dtype(kind) if is_autocasting(kind) else None


def autocast_dtype(dtype: torch.dtype, kind: str) -> torch.dtype:
    """The dtype after autocast on this device type; `dtype` itself where autocast is off."""
    cast = autocast_of(kind)
    return cast if cast is not None and dtype.is_floating_point and dtype != torch.float64 else dtype


def in_forward_mode() -> bool:
    """Whether tensors may carry tangents here (`torch.func.jvp`, `torch.autograd.forward_ad.dual_level`)."""
    return not is_compiling() and forward_level() >= 0


def in_transform(*kinds: str) -> bool:
    """Whether the code runs inside a transform "Vmap", "Jvp" or "Grad" (torch.func.grad, vjp, jacrev, hessian)."""
    if is_compiling() or peek_interpreter_stack() is None:
        return False
    stack = get_interpreter_stack() or []
    wanted = [getattr(TransformType, kind) for kind in kinds]
    return any(interpreter.key() in wanted for interpreter in stack)


def can_look(tensor: Tensor) -> bool:
    """Whether the values of a tensor may decide the computation: not on a GPU, where reading a value synchronises, and
    not in a compiled graph or under vmap, which have no values yet."""
    if not tensor.is_cpu or is_compiling():
        return False
    if type(tensor) in PLAIN and not (is_tracing() or count_dispatch_modes() or peek_interpreter_stack()):
        return True
    return has_values(tensor) and not in_transform("Vmap")


def is_its_memory(tensor: Tensor) -> bool:
    """Whether a CPU tensor's elements lie in its memory, at its strides.

    False for lazily negated and conjugated views, zero tensors, sparse tensors and wrappers of transforms.

    >>> import torch
    >>> is_its_memory(torch.ones(2)), is_its_memory(torch._neg_view(torch.ones(2)))
    (True, False)
    """
    keys = dispatch_keys(tensor)
    return keys.has(DispatchKey.CPU) and not keys.raw_repr() & _bits_of_others()


@cache
def _bits_of_others() -> int:
    """NOT_ITS_MEMORY as one bit mask: one dispatcher query a key takes a microsecond."""
    return reduce(or_, (DispatchKeySet(getattr(DispatchKey, name)).raw_repr() for name in NOT_ITS_MEMORY))


def has_values(tensor: Tensor) -> bool:
    """Whether the tensor's values hold for every later run.

    False on the `meta` device, in a `FakeTensorMode`, while compiling and in a trace (`make_fx`, `torch.jit.trace`).
    """
    if is_compiling() or tensor.device.type == "meta" or is_tracing():
        return False
    if hasattr(tensor, "fake_mode") or not count_dispatch_modes():
        return not hasattr(tensor, "fake_mode")
    return all(get_dispatch_mode(kind) is None for kind in (DispatchModeKind.FAKE, DispatchModeKind.PROXY))


def may_be_kept(tensor: Tensor) -> bool:
    """Whether a tensor computed beside this one, not from it, may be cached: not on a GPU, for its streams."""
    if is_compiling() or not tensor.is_cpu or is_tracing():
        return False
    return not count_dispatch_modes() and peek_interpreter_stack() is None


class KeptPlace(NamedTuple):
    """The memory and the order of a cached tensor: another stream may read it too early."""

    device: torch.device
    stream: int


def where_kept(tensor: Tensor) -> KeptPlace | None:
    """The cache key of a tensor computed beside this one, not from it; None if caching is unsafe.

    On CUDA the key holds the stream. A captured CUDA graph owns its memory alone.

    >>> where_kept(torch.ones(2)), where_kept(torch.ones(2, device="meta"))
    (KeptPlace(device=device(type='cpu'), stream=0), None)
    """
    if tensor.is_cpu:
        return KeptPlace(tensor.device, 0) if may_be_kept(tensor) else None
    if is_compiling() or not tensor.is_cuda or is_tracing() or count_dispatch_modes() or peek_interpreter_stack():
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    return KeptPlace(tensor.device, torch.cuda.current_stream(tensor.device).cuda_stream)


def is_readable(*tensors: Tensor) -> bool:
    """Whether the elements of these tensors lie in CPU memory, readable now.

    A tensor subclass may define its own products, and a recorded graph would miss the reading.

    >>> is_readable(torch.ones(2)), is_readable(torch.ones(2, device="meta"))
    (True, False)
    >>> is_readable(torch._neg_view(torch.ones(2)))
    False
    """
    # The first tensor decides for all plain tensors.
    is_run = not tensors or (type(tensors[0]) in PLAIN and can_look(tensors[0]))
    return is_run and all(type(t) in PLAIN and is_its_memory(t) for t in tensors)


def offset_and_shape(mask: object) -> tuple[int, tuple[int, int]] | None:
    """The offset and the (T, S) of the causal mask that torch's `CausalBias` stands for; None for everything else. Its
    memory is never written."""
    bias = sys.modules.get("torch.nn.attention.bias")  # imported, if there is one
    if bias is None or not isinstance(mask, bias.CausalBias):
        return None
    queries, keys = mask.seq_len_q, mask.seq_len_kv
    return keys - queries if mask.variant == bias.CausalVariant.LOWER_RIGHT else 0, (queries, keys)
