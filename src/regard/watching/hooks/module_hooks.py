"""The global hooks behind each thread's stack of running modules.

The hooks are global because torch does not run an encoder layer with own hooks fused: it would be slower, and its
output would differ in its last bits.
"""

import sys
import threading
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from regard.tensors.guards import is_compiling
from regard.tensors.torch_private import DisableTorchFunction, forget_global_hook, tree_leaves
from regard.watching.hooks.observers import MODULES, known_thread
from regard.watching.kept.arguments import small_arguments
from regard.watching.readers.flex_calls import hand_on_compiled
from regard.watching.readers.functions import Args, Kwargs
from regard.watching.readers.mixing import CONVOLUTION
from regard.watching.readers.product_calls import close, observe_plain
from regard.watching.running.module_kinds import (
    FUSED_FORWARDS,
    FUSED_LAYERS,
    FUSED_SUBCLASS,
    forward_of,
    has_no_attention,
    may_run_fused,
)
from regard.watching.running.observed_call import Interceptor
from regard.watching.running.thread_state import RunningModule, ThreadState, is_in_backward, take_out

_lock = threading.RLock()
_handles: list[RemovableHandle] = []
_open: list[Interceptor] = []


def install_hooks(watch: Interceptor) -> None:
    with _lock:
        _open.append(watch)
        if len(_open) == 1:
            _handles.append(nn.modules.module.register_module_forward_pre_hook(_before))
            _handles.append(nn.modules.module.register_module_forward_hook(_after, with_kwargs=True, always_call=True))


def remove_hooks(watch: Interceptor) -> None:
    with _lock:
        _open.remove(watch)
        while not _open and _handles:
            handle = _handles.pop()
            handle.remove()
            forget_global_hook(handle.id)


def _before(module: nn.Module, args: Args) -> None:
    thread = known_thread()
    if len(_open) > (0 if thread is None else len(thread.watches)) and not is_compiling():
        _tell_others(module, () if thread is None else thread.watches)
    if thread is None or not thread.watches:
        return
    if thread.compiled:
        hand_on_compiled(thread)
    if thread.plain is not None:
        # Another hook's exception hid its end; or it calls this module (a gated norm).
        thread.end_plain()
    if not thread.stack and not is_compiling():
        with DisableTorchFunction():
            thread.streams.given(*tree_leaves((args, _keywords())))
    if has_no_attention(module) and not (thread.editors and is_in_backward()):
        thread.begin_plain(module)
        return
    thread.stack.append(RunningModule(module, thread.taken, thread.hidden))
    if not is_compiling():
        thread.stack[-1].arguments = small_arguments(module, args, _keywords())
    if thread.editors and is_in_backward():
        thread.begin_recomputation()
    may_hide = isinstance(module, FUSED_LAYERS) and thread.may_hide(module)
    if may_hide != thread.hidden:
        thread.hide(may_hide)
    for watch in thread.watches:
        watch.entered(module)


def _tell_others(module: nn.Module, here: Collection[Interceptor]) -> None:
    for watch in tuple(_open):
        if watch not in here:
            watch.ran_elsewhere(module)


def _keywords() -> dict[str, Any] | None:
    """The keyword arguments of the module that a hook is called for: a global hook gets none, but torch's function that
    calls it has them."""
    given: dict[str, Any] | None = sys._getframe(2).f_locals.get("kwargs")
    return given


def _after(module: nn.Module, args: Args, *rest: Any) -> None:
    """End a module's forward; `rest` is (keyword arguments, output) if it returned, and (None,) if it raised."""
    thread = known_thread()
    if thread is None:
        return
    if thread.plain is not None:
        is_this = thread.plain is module
        try:
            if is_this and len(rest) == 2:
                # Our mode is still off: it would see each function of a tensor here.
                observe_plain(thread, module, args, rest[1])
        finally:
            thread.end_plain()
        if is_this:
            return
    if thread.stack:
        _end(thread, module, args, *rest)


def _end(thread: ThreadState, module: nn.Module, args: Args, *rest: Any) -> None:
    # Another hook's exception may have left modules on the stack, or kept this one off it.
    if thread.stack[-1].module is not module and not any(frame.module is module for frame in thread.stack):
        return
    while thread.stack[-1].module is not module:
        thread.stack.pop()
    frame = thread.stack[-1]
    if thread.compiled:
        hand_on_compiled(thread)
    try:
        if len(rest) == 2:
            _finish(thread, frame, args, *rest)
    finally:
        thread.stack.pop()
        if frame.compares and thread.stack:
            thread.stack[-1].holds_comparison = True
        if frame.was_hidden != thread.hidden:
            thread.hide(frame.was_hidden)
        if frame.is_recomputed:
            take_out(thread.mode)
    if len(rest) == 2:
        for editor in thread.editors:
            if editor.refusal is not None:
                refusal, editor.refusal = editor.refusal, None
                raise refusal


def _finish(thread: ThreadState, frame: RunningModule, args: Args, kwargs: Kwargs, output: Any) -> None:
    module = frame.module
    if isinstance(module, FUSED_LAYERS):
        forward = forward_of(module)
        if (observe := MODULES.get(forward)) is not None:
            thread.try_to(observe, thread, frame, module, args, kwargs, output)
        elif forward not in FUSED_FORWARDS and may_run_fused(module) and thread.taken == frame.taken:
            thread.unread(FUSED_SUBCLASS)
    if "compress_rate" in module.__dict__:
        from regard.watching.readers.channel_calls import observe_compressor

        thread.try_to(observe_compressor, thread, frame, module, args, kwargs, output)
        return
    if thread.taken == frame.taken and len(frame.convolutions) == 1:
        thread.give(frame.convolutions[0], module)
    if thread.taken == frame.taken and frame.convolutions:
        frame.mixes = CONVOLUTION
    if thread.taken == frame.taken and (how := "recurrence" if isinstance(module, nn.RNNBase) else frame.mixes):
        thread.mixed(module, how)
    if frame.pending or frame.is_in_blocks or thread.traces:
        thread.try_to(close, thread, frame)
