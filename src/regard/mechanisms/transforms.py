"""Which of torch's transforms the code runs under: compilation, forward mode, vmap, torch.func's gradients.

torch has no public way to ask this. The code that computes has to know it: a fused kernel has no forward derivative and
no rule for vmap, and an autograd.Function of ours hides its backward pass from torch.func.
"""

from functools import cache, reduce
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from regard.torch_private import (
    DispatchKey,
    DispatchKeySet,
    DispatchModeKind,
    TransformType,
    count_dispatch_modes,
    dispatch_keys,
    forward_level,
    get_dispatch_mode,
    get_interpreter_stack,
    is_tracing,
    peek_interpreter_stack,
)

NOT_ITS_MEMORY = (
    "Negative", "Conjugate", "ZeroTensor", "Functionalize", "Python", "FuncTorchBatched", "FuncTorchGradWrapper",
)  # fmt: skip
"""What the dispatcher calls tensors whose numbers are made when they are read."""


def in_forward_mode() -> bool:
    """Whether tensors may carry tangents here (`torch.func.jvp`, `torch.autograd.forward_ad.dual_level`).

    >>> import torch
    >>> with torch.autograd.forward_ad.dual_level():
    ...     in_forward_mode()
    True
    """
    return not torch.compiler.is_compiling() and forward_level() >= 0


def in_transform(*kinds: str) -> bool:
    """Whether the code runs inside a transform "Vmap", "Jvp" or "Grad" (torch.func.grad, vjp, jacrev, hessian).

    >>> import torch
    >>> torch.func.vmap(lambda x: (print(in_transform("Vmap"), in_transform("Grad")), x)[1])(torch.ones(1))
    True False
    tensor([1.])
    """
    if torch.compiler.is_compiling() or peek_interpreter_stack() is None:
        return False
    stack = get_interpreter_stack() or []
    wanted = [getattr(TransformType, kind) for kind in kinds]
    return any(interpreter.key() in wanted for interpreter in stack)


def in_trace() -> bool:
    """Whether `torch.jit.trace` records what runs here. What follows from a length or a value would stay in its graph.

    >>> in_trace()
    False
    """
    return not torch.compiler.is_compiling() and is_tracing()


def can_look(tensor: Tensor) -> bool:
    """Whether the values of a tensor may decide what is computed.

    They may not on a GPU, where reading a value waits for the device. They may not in a compiled graph or under vmap
    either, where there are no values yet.

    >>> import torch
    >>> can_look(torch.ones(2))
    True
    """
    return tensor.device.type == "cpu" and has_values(tensor) and not in_transform("Vmap")


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
    if torch.compiler.is_compiling() or tensor.device.type == "meta" or is_tracing():
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
    if torch.compiler.is_compiling() or not tensor.is_cpu or is_tracing():
        return False
    return not count_dispatch_modes() and peek_interpreter_stack() is None


class KeptPlace(NamedTuple):
    """Where what is computed stands, and in which order: a stream of another number may read it too early."""

    device: torch.device
    stream: int


def where_kept(tensor: Tensor) -> KeptPlace | None:
    """Where what is computed beside this tensor, and not from it, may be kept for later calls of the same place.

    On CUDA it may too, for the stream that computes it, unless a graph is captured: that one alone owns its memory.

    >>> where_kept(torch.ones(2)), where_kept(torch.ones(2, device="meta"))
    (KeptPlace(device=device(type='cpu'), stream=0), None)
    """
    if tensor.is_cpu:
        return KeptPlace(tensor.device, 0) if may_be_kept(tensor) else None
    if torch.compiler.is_compiling() or not tensor.is_cuda or not _runs_as_it_stands():
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    return KeptPlace(tensor.device, torch.cuda.current_stream(tensor.device).cuda_stream)


def _runs_as_it_stands() -> bool:
    return not is_tracing() and not count_dispatch_modes() and peek_interpreter_stack() is None


def may_have_own_gradient(tensor: Tensor) -> bool:
    """Whether an `autograd.Function` of ours may compute this: on the CPU, where no graph or transform would lose it.

    >>> may_have_own_gradient(torch.ones(2))
    True
    """
    return (
        not torch.compiler.is_compiling()
        and tensor.device.type == "cpu"
        and not in_trace()
        and not in_forward_mode()
        and not in_transform("Vmap", "Grad", "Jvp")
    )
