"""The one table of observed functions and modules, each with its observer.

Operators that are not in it are observed too: torch's own functions under other names, and opaque ones of others.
"""

import sys
import threading
import types
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from regard.functional import RECURRENT, attention
from regard.tensors.guards import is_compiling
from regard.tensors.torch_private import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    flex_attention_operator,
    tree_leaves,
)
from regard.watching.readers.contractions import READERS
from regard.watching.readers.flex_calls import observe_flex
from regard.watching.readers.functions import OWN, Args, Func, Kwargs, name_of, namespace_of
from regard.watching.readers.mixing import MIXING, observe_mixing
from regard.watching.readers.multi_head_calls import observe_encoder_layer, observe_function, observe_module
from regard.watching.readers.product_calls import observe_product
from regard.watching.readers.sdpa_calls import observe_attention, observe_sdpa
from regard.watching.readers.softmax_calls import (
    observe_exponential,
    observe_masked,
    observe_quotient,
    observe_softmax,
    observe_sum,
)
from regard.watching.readers.traced_calls import (
    FOLLOWED,
    JOINED,
    WRITES,
    FunctionObserver,
    after,
    after_traces,
    observe_choice,
    observe_embedding,
    observe_followed,
    observe_joined,
    observe_traced,
    observe_written,
)
from regard.watching.running.thread_state import RunningModule, ThreadState

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
    # A call of positions and masks alone has no scores or values. transformers 4.57 makes its masks so: by `torch.vmap`
    # of functions that index a mask of padding, an operator of torch with a Python function.
    tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
    if not tensors or any(tensor.dtype not in POSITIONS for tensor in tensors):
        _name(thread, func)


@after_traces
def observe_own(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    if any(part in name_of(func) for part in ATTENTION):
        _name(thread, func)


def is_own(func: Any) -> bool:
    """True if an operator is one of torch's own functions under another name."""
    return not isinstance(func, HigherOrderOperator) and namespace_of(func) in OWN


OBSERVING = tuple(f"regard.watching.{folder}." for folder in ("hooks", "readers", "running"))
"""The code between a model's call and the watches: it stands around every call that is observed."""


def _is_ours() -> bool:
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


ModuleObserver = Callable[[ThreadState, RunningModule, nn.Module, tuple[Any, ...], dict[str, Any], Any], None]
"""Takes (thread, frame, module, args, kwargs, output) of a module whose forward has returned."""

BY_NAME: dict[str, FunctionObserver] = {
    **dict.fromkeys(("softmax", "log_softmax", "gumbel_softmax", "normalize"), observe_softmax),
    "exp": observe_exponential,
    **dict.fromkeys(("sum", "logsumexp"), observe_sum),
    **dict.fromkeys(("div", "sub"), observe_quotient),
    **dict.fromkeys(READERS, observe_product),
    **dict.fromkeys(FOLLOWED, observe_followed),
    **dict.fromkeys(("add", "mul"), observe_masked),
    **dict.fromkeys(JOINED, observe_joined),
    "topk": observe_choice,
    "embedding": observe_embedding,
    **dict.fromkeys(WRITES, observe_written),
    **dict.fromkeys(MIXING, observe_mixing),
}


def _written_out() -> dict[object, FunctionObserver]:
    places = (torch, Tensor, F, torch.special, torch.linalg, torch.fft)
    found: dict[object, FunctionObserver] = {}
    for place in places:
        for attribute in dir(place):
            function = getattr(place, attribute, None)
            if callable(function) and (observer := BY_NAME.get(name_of(function))) is not None:
                found[function] = observer
    return found


FUNCTIONS: dict[object, FunctionObserver] = {
    **_written_out(),
    attention: observe_attention,
    F.scaled_dot_product_attention: observe_sdpa,
    F.multi_head_attention_forward: observe_function,
    flex_attention_operator: observe_flex,
}

MODULES: dict[object, ModuleObserver] = {
    nn.MultiheadAttention.forward: observe_module,
    nn.TransformerEncoderLayer.forward: observe_encoder_layer,
}


def of_operator(func: Any) -> FunctionObserver:
    if not is_own(func):
        return observe_operator
    name = name_of(func)
    return observe_sdpa if name == "scaled_dot_product_attention" else BY_NAME.get(name, observe_own)


OPERATORS = (OpOverload, OpOverloadPacket, HigherOrderOperator)

NATIVE = frozenset({
    types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType,
    types.WrapperDescriptorType,
})  # fmt: skip
"""The types of other functions: those of torch, of its tensors and of Python. A type lookup takes a tenth of the time
of `isinstance` with the operator classes."""


def _of_recurrence(*call: Any) -> Any:
    from regard.watching.readers.recurrent_calls import observe_linear_attention  # with the first such call

    return observe_linear_attention(*call)


class FunctionMode(TorchFunctionMode):
    def __init__(self, thread: ThreadState) -> None:
        super().__init__()
        self._thread = thread
        self._compiled = thread.compiled

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if is_compiling():
            result = func(*args, **(kwargs or {}))
            if func is flex_attention_operator:
                # torch's compiler traces this line too, into the code after each run of the kernel. Reading the other
                # results would select another kernel.
                # A scale that varies between calls is a symbol, which only a tensor carries out of the graph.
                scale = torch.full((), args[5], dtype=torch.float64, device=args[0].device)
                self._compiled.append(((*args[:5], scale, *args[6:]), result[0]))
            return result
        thread = self._thread
        observe = _of_recurrence if func in RECURRENT else FUNCTIONS.get(func)
        if observe is None and type(func) in NATIVE and not thread.traces.alive and not thread.editors:
            # Most functions go this way: each line here is run some hundred times in a small model.
            return func(*args, **kwargs) if kwargs else func(*args)
        if thread.is_reading or not thread.watches:
            return func(*args, **(kwargs or {}))
        if thread.editors and (change := thread.editors[0].changes.get(func)) is not None:
            return change(thread, func, args, kwargs or {})
        if observe is None:
            if isinstance(func, OPERATORS):
                observe = of_operator(func)
            elif thread.traces:
                observe = observe_traced
            else:
                return func(*args, **(kwargs or {}))
        return observe(thread, func, args, kwargs or {})


_local = threading.local()


def this_thread() -> ThreadState:
    thread = known_thread()
    if thread is None:
        thread = _local.thread = ThreadState()
        thread.mode = FunctionMode(thread)
    return thread


def known_thread() -> ThreadState | None:
    return getattr(_local, "thread", None)
