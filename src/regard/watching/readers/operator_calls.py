"""Observe operators: torch's own functions under other names, and opaque ones of others."""

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from regard.tensors.torch_private import HigherOrderOperator, tree_leaves
from regard.watching.readers.functions import OWN, Args, Func, Kwargs, name_of, namespace_of
from regard.watching.readers.traced_calls import after, after_traces
from regard.watching.running.thread_state import ThreadState

ATTENTION = ("attn", "attention", "flash", "fmha", "mha", "sdpa", "softmax")
"""Parts of the names of attention operators. An operator's own name, which its library published, is all that an opaque
operator shows; no module's name is asked."""
OURS = frozenset({"regard"})
HARMLESS = frozenset({"transformers", "torchvision", "profiler", "c10d", "_c10d_functional", "inductor", "rngprims",
                      "debugprims",
                      "torchaudio", "quantized", "mkldnn", "onednn", "mkl", "sparse", "fsdp", "streams"})  # fmt: skip
"""Namespaces of operators that attend only where their names say so."""

POSITIONS = frozenset({torch.bool, torch.int32, torch.int64})
"""Dtypes of positions and masks; bytes may be quantized queries, keys and values."""


@after
def observe_operator(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    """An opaque operator, which is named."""
    if not _is_of_positions((args, kwargs, result)):
        _name(thread, func)


@after_traces
def observe_own(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    """An operator of torch outside the table, which is named if it attends."""
    if any(part in name_of(func) for part in ATTENTION):
        _name(thread, func)


def is_own(func: Any) -> bool:
    """True if an operator is one of torch's own functions under another name."""
    return not isinstance(func, HigherOrderOperator) and namespace_of(func) in OWN


def _is_of_positions(given: object) -> bool:
    """True if all tensors of a call are positions or masks, without scores or values. transformers 4.57 makes its masks
    so: by `torch.vmap` of functions that index a mask of padding, an operator of torch with a Python function."""
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(tensor.dtype in POSITIONS for tensor in tensors)


OBSERVING = tuple(f"regard.watching.{folder}." for folder in ("hooks", "readers", "running"))
"""The code between a model's call and the watches: it stands around every call that is observed."""


def _is_ours() -> bool:
    """True for an operator of this library, as in a read of a map while a model runs."""
    running: FrameType | None = sys._getframe(2)
    while running is not None:
        name = running.f_globals.get("__name__", "")
        if name.startswith("regard.") and not name.startswith(OBSERVING):
            return True
        running = running.f_back
    return False


def _name(thread: ThreadState, func: Any) -> None:
    if isinstance(func, HigherOrderOperator):
        name, namespace = f"torch.ops.higher_order.{func.name()}", "higher_order"
    else:
        namespace = namespace_of(func) or ""
        name = f"torch.ops.{namespace}.{name_of(func)}"
    attends = any(part in name.lower() for part in ATTENTION)
    if namespace not in OURS and (attends or namespace not in HARMLESS):
        if _is_ours():
            return
        thread.unread(f"{name}, an operator that cannot be looked into")
