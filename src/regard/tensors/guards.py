"""The state in which code runs: plain, recorded, compiled, traced, transformed, observed, cast. It is asked here alone.

`look` answers once in a public call, and its answer is handed down. torch has no public way to ask for most of this.
Code that computes has to know it: a fused kernel has no forward derivative and no rule for vmap, an autograd.Function
of ours hides its backward pass from torch.func, and a cache must hold nothing that a graph has made.
"""

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
"""What the dispatcher calls tensors whose numbers are made when they are read."""
PLAIN = (Tensor, torch.nn.Parameter)
"""The classes whose products are torch's own."""
is_compiling, is_exporting = torch.compiler.is_compiling, torch.compiler.is_exporting
"""Whether torch.compile traces the code, and whether torch.export does."""
is_recorded, is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
"""Whether autograd records operations, and whether new tensors are those of inference mode."""
is_overridden, has_torch_functions = has_torch_function_variadic, is_torch_function_enabled
"""Whether a mode or the class of a tensor sees a call of torch's functions, and whether any may."""
function_mode, function_modes = get_function_mode, get_function_modes
"""The mode that sees torch's functions first, and all of them, this one last."""

AUTOCASTS = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))
"""The usual kinds of devices that have autocast."""


@dataclass(frozen=True, slots=True)
class State:
    """The state in which one call runs."""

    is_recorded: bool
    """Whether autograd records operations on tensors that need a gradient."""
    is_plain: bool = True
    """Whether code runs as it stands: without graph, trace, transform, tangents and dispatch modes, on plain tensors.

    Decisions that follow from shapes may then be cached, since shapes are Python's integers.
    """
    is_compiling: bool = False
    is_traced: bool = False
    """Whether `torch.jit.trace` records the call."""
    has_tangents: bool = False
    """Whether tensors may carry tangents of forward-mode differentiation."""
    is_transformed: bool = False
    """Whether the call runs inside torch.vmap, torch.func.grad or torch.func.jvp."""
    is_cast: bool = False
    """Whether autocast is on for the device of the call."""


_PLAIN = State(False), State(True)


def look(tensor: Tensor) -> State:
    """The state in which a call of this tensor runs.

    >>> look(torch.ones(2)).is_plain, look(torch.ones(2, device="meta")).is_recorded
    (True, True)
    """
    grad = is_recorded()
    if is_compiling():
        return State(grad, is_plain=False, is_compiling=True, is_cast=is_autocasting(tensor.device.type))
    if not isinstance(tensor, Tensor):
        return _PLAIN[grad]  # The check of the arguments says so.
    kind = tensor.device.type
    is_cast = torch.is_autocast_enabled(kind) if kind in AUTOCASTS else is_autocasting(kind)
    is_traced, is_transformed = is_tracing(), peek_interpreter_stack() is not None
    try:
        has_tangents = level_of(forward_ad) >= 0
    except AttributeError:
        has_tangents = forward_level() >= 0  # It says which torch has it.
    is_plain = not (is_traced or is_transformed or has_tangents or count_dispatch_modes()) and type(tensor) in PLAIN
    if is_plain and not is_cast:
        return _PLAIN[grad]
    return State(grad, is_plain, False, is_traced, has_tangents, is_transformed, is_cast)


def is_observed() -> bool:
    """Whether a dispatch mode sees the operators that run.

    >>> is_observed()
    False
    """
    return bool(count_dispatch_modes())


def is_function_observed() -> bool:
    """Whether a mode sees torch's functions, as a watch does.

    >>> is_function_observed()
    False
    """
    return get_function_mode() is not None


def is_transformed() -> bool:
    """Whether the code runs inside torch.vmap or a transform of torch.func.

    >>> is_transformed()
    False
    """
    return peek_interpreter_stack() is not None


def is_autocasting(kind: str) -> bool:
    """Whether autocast is on for a kind of device. The answer is no for kinds without autocast, such as `meta`.

    >>> is_autocasting("meta")
    False
    """
    # torch 2.8 cannot trace the question into a compiled graph, where devices have been asked for before.
    can = kind in AUTOCASTS or (not is_compiling() and torch.amp.is_autocast_available(kind))
    return can and torch.is_autocast_enabled(kind)


def autocast_of(kind: str) -> torch.dtype | None:
    """The dtype to which autocast casts on a kind of device; None where it is off.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     autocast_of("cpu"), autocast_of("meta")
    (torch.bfloat16, None)
    """
    return torch.get_autocast_dtype(kind) if is_autocasting(kind) else None


def autocast_dtype(dtype: torch.dtype, kind: str) -> torch.dtype:
    """The dtype that numbers of this dtype get from autocast on this kind of device, if it is on there.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     [autocast_dtype(dtype, "cpu") for dtype in (torch.float32, torch.float64, torch.int64)]
    [torch.bfloat16, torch.float64, torch.int64]
    """
    cast = autocast_of(kind)
    return cast if cast is not None and dtype.is_floating_point and dtype != torch.float64 else dtype


def in_forward_mode() -> bool:
    """Whether tensors may carry tangents here (`torch.func.jvp`, `torch.autograd.forward_ad.dual_level`).

    >>> import torch
    >>> with torch.autograd.forward_ad.dual_level():
    ...     in_forward_mode()
    True
    """
    return not is_compiling() and forward_level() >= 0


def in_transform(*kinds: str) -> bool:
    """Whether the code runs inside a transform "Vmap", "Jvp" or "Grad" (torch.func.grad, vjp, jacrev, hessian).

    >>> import torch
    >>> torch.func.vmap(lambda x: (print(in_transform("Vmap"), in_transform("Grad")), x)[1])(torch.ones(1))
    True False
    tensor([1.])
    """
    if is_compiling() or peek_interpreter_stack() is None:
        return False
    stack = get_interpreter_stack() or []
    wanted = [getattr(TransformType, kind) for kind in kinds]
    return any(interpreter.key() in wanted for interpreter in stack)


def in_trace() -> bool:
    """Whether `torch.jit.trace` records what runs here. What follows from a length or a value would stay in its graph.

    >>> in_trace()
    False
    """
    return not is_compiling() and is_tracing()


def can_look(tensor: Tensor) -> bool:
    """Whether the values of a tensor may decide what is computed.

    They may not on a GPU, where reading a value waits for the device. They may not in a compiled graph or under vmap
    either, where there are no values yet.

    >>> import torch
    >>> can_look(torch.ones(2))
    True
    """
    if not tensor.is_cpu or is_compiling():
        return False
    if type(tensor) in PLAIN and not (is_tracing() or count_dispatch_modes() or peek_interpreter_stack()):
        return True
    return has_values(tensor) and not in_transform("Vmap")


def is_its_memory(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor of the CPU are those in its memory, where its strides say.

    They are not for lazily negated and conjugated views, zeros without memory, sparse tensors, and those that a
    transform wraps.

    >>> import torch
    >>> is_its_memory(torch.ones(2)), is_its_memory(torch._neg_view(torch.ones(2)))
    (True, False)
    """
    keys = dispatch_keys(tensor)
    return keys.has(DispatchKey.CPU) and not keys.raw_repr() & _bits_of_others()


@cache
def _bits_of_others() -> int:
    """NOT_ITS_MEMORY as the dispatcher keeps it: to ask for each of them takes a microsecond."""
    return reduce(or_, (DispatchKeySet(getattr(DispatchKey, name)).raw_repr() for name in NOT_ITS_MEMORY))


def has_values(tensor: Tensor) -> bool:
    """Whether the tensor holds numbers that are those of every later run.

    It does not on the `meta` device, in a `FakeTensorMode`, while compiling, and in a trace (`make_fx`,
    `torch.jit.trace`): what is decided by these numbers would be kept for others.

    >>> import torch
    >>> has_values(torch.ones(2)), has_values(torch.ones(2, device="meta"))
    (True, False)
    """
    if is_compiling() or tensor.device.type == "meta" or is_tracing():
        return False
    if hasattr(tensor, "fake_mode") or not count_dispatch_modes():
        return not hasattr(tensor, "fake_mode")
    return all(get_dispatch_mode(kind) is None for kind in (DispatchModeKind.FAKE, DispatchModeKind.PROXY))


def may_be_kept(tensor: Tensor) -> bool:
    """Whether what is computed beside this tensor, and not from it, may be kept for later calls.

    It may where the code runs as it stands, on the CPU. On a GPU the next call may be on another stream.

    >>> may_be_kept(torch.ones(2))
    True
    """
    if is_compiling() or not tensor.is_cpu or is_tracing():
        return False
    return not count_dispatch_modes() and peek_interpreter_stack() is None


class KeptPlace(NamedTuple):
    """The memory and the order of a cached tensor: a stream of another number may read it too early."""

    device: torch.device
    stream: int


def where_kept(tensor: Tensor) -> KeptPlace | None:
    """The place under which a tensor computed beside this one, and not from it, may be cached; None if it may not.

    On CUDA it belongs to the stream that computes it. While a graph is captured that graph alone owns its memory.

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


def may_have_own_gradient(tensor: Tensor) -> bool:
    """Whether an `autograd.Function` of ours may compute this: on the CPU, where no graph or transform would lose it.

    >>> may_have_own_gradient(torch.ones(2))
    True
    """
    return (
        not is_compiling()
        and tensor.device.type == "cpu"
        and not in_trace()
        and not in_forward_mode()
        and not in_transform("Vmap", "Grad", "Jvp")
    )


def is_readable(*tensors: Tensor) -> bool:
    """Whether the numbers of these tensors stand in the memory of the CPU, and may be read now.

    A tensor of another class may have products of its own, and a recorded graph would not see what is read.

    >>> is_readable(torch.ones(2)), is_readable(torch.ones(2, device="meta"))
    (True, False)
    """
    # Whether there are values depends on nothing else that differs between plain tensors.
    is_run = not tensors or (type(tensors[0]) in PLAIN and can_look(tensors[0]))
    return is_run and all(type(t) in PLAIN and is_its_memory(t) for t in tensors)
