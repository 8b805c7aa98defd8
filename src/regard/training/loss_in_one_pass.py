"""The loss of rows of logits by compiled code: for which tensors it may be taken, and the call."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.compiled.loss_work import WORK
from regard.compiled.thread_team import run_in_threads
from regard.mechanisms.guards import is_readable
from regard.mechanisms.readable import DTYPES, is_installed
from regard.torch_private import count_dispatch_modes

SMALL = 1 << 16
"""Fewer logits are left to torch's operations: to load numba takes longer than they do."""


def has_one_pass(logits: Float[Tensor, "N V"], targets: Int[Tensor, "N 1"]) -> bool:
    """Whether compiled code can read these logits and targets, and is worth its start.

    It writes where a target says, so that targets outside 0..V-1 are left to torch's operations, which refuse them.

    >>> has_one_pass(torch.zeros(2, 3), torch.tensor([[0], [1]]))
    False
    """
    if logits.numel() < SMALL or logits.dtype not in DTYPES or targets.dtype != torch.int64 or not is_installed():
        return False
    if count_dispatch_modes():
        return False  # A mode that looks at the operators of torch would see nothing.
    if not (is_readable(logits, targets) and logits.is_contiguous() and targets.is_contiguous()):
        return False
    lowest, highest = torch.aminmax(targets)
    return int(lowest) >= 0 and int(highest) < logits.shape[1]


def loss_in_one_pass(
    logits: Float[Tensor, "N V"], targets: Int[Tensor, "N 1"], smoothing: float, wanted: bool
) -> Float[Tensor, ""]:
    """The summed cross-entropy of rows for which `has_one_pass` holds, by as many threads as torch has.

    Args:
        logits: are overwritten; if `wanted`, by the gradient softmax(z) - (1 - e) * onehot - e / V.
        targets: the index of each row.
        smoothing: the share e in 0..1 of the target's mass that is spread over all V.
        wanted: whether a gradient is wanted.

    Returns:
        The sum in float32, which is the same for any number of threads: it is taken in the order of the rows.
    """
    from regard.compiled.loss_loop import run  # numba compiles here, or takes what the disk has

    counter, losses = np.zeros(1, np.int64), np.empty(len(logits))
    addresses = logits.data_ptr(), targets.data_ptr(), losses.ctypes.data
    kind = logits.dtype == torch.bfloat16, wanted, smoothing
    work = np.array([(*logits.shape, counter.ctypes.data, *addresses, *kind)], WORK)
    run_in_threads(run, work.ctypes.data, torch.get_num_threads())
    return torch.tensor(sum(losses.tolist()), dtype=torch.float32, device="cpu")
