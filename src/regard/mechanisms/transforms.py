"""Which of torch's transforms the code runs under: compilation, forward mode, vmap, torch.func's gradients.

torch has no public way to ask. Whoever computes has to know, since a fused kernel has no forward derivative and no rule
for vmap, and an autograd.Function of ours hides from torch.func what its backward pass does.
"""

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad


def in_forward_mode() -> bool:
    """Whether tensors may carry tangents here (`torch.func.jvp`, `torch.autograd.forward_ad.dual_level`).

    >>> import torch
    >>> with torch.autograd.forward_ad.dual_level():
    ...     in_forward_mode()
    True
    """
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def in_transform(*kinds: str) -> bool:
    """Whether one of the transforms around is "Vmap", "Jvp" or "Grad" (torch.func.grad, vjp, jacrev, hessian).

    >>> import torch
    >>> torch.func.vmap(lambda x: (print(in_transform("Vmap"), in_transform("Grad")), x)[1])(torch.ones(1))
    True False
    tensor([1.])
    """
    if torch.compiler.is_compiling() or _functorch.peek_interpreter_stack() is None:
        return False
    stack = _functorch.get_interpreter_stack() or []
    wanted = [getattr(_functorch.TransformType, kind) for kind in kinds]
    return any(interpreter.key() in wanted for interpreter in stack)


def can_look(tensor: Tensor) -> bool:
    """Whether the values of a tensor may decide what is computed.

    Not on a GPU, where looking waits for the device; nor in a compiled graph or under vmap, where there are none yet.

    >>> import torch
    >>> can_look(torch.ones(2))
    True
    """
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not in_transform("Vmap")
