"""The state of the running thread, made when the thread first opens a watch, and the mode that sees its functions."""

import threading
import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from regard.functional import RECURRENT
from regard.tensors.guards import is_compiling
from regard.tensors.torch_private import HigherOrderOperator, OpOverload, OpOverloadPacket, flex_attention_operator
from regard.watching.hooks.observers import FUNCTIONS, of_operator
from regard.watching.readers.functions import Args, Kwargs
from regard.watching.readers.traced_calls import observe_traced
from regard.watching.running.thread_state import ThreadState

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
    """The same; None for a thread that never opened a watch."""
    return getattr(_local, "thread", None)
