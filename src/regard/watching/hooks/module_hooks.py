"""The global hooks behind each thread's stack of running modules, the functions that are replaced beside the classes of
a watched model, and the threads of open watches.

The hooks are global because torch does not run an encoder layer with own hooks fused: it would be slower, and its
output would differ in its last bits.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from regard.errors import ArgumentError
from regard.tensors.guards import is_compiling
from regard.tensors.torch_private import DisableTorchFunction, forget_global_hook, tree_leaves
from regard.watching.hooks.interceptor import Interceptor
from regard.watching.hooks.module_kinds import (
    FUSED_FORWARDS,
    FUSED_SUBCLASS,
    TORCHS,
    forward_of,
    is_plain,
    may_run_fused,
)
from regard.watching.hooks.observers import MODULES
from regard.watching.hooks.thread_state import RunningModule, ThreadState, is_in_backward, take_out
from regard.watching.hooks.torch_mode import FunctionMode
from regard.watching.readers.flex_calls import hand_on_compiled
from regard.watching.readers.functions import Args, Kwargs
from regard.watching.readers.mixing import CONVOLUTION
from regard.watching.readers.product_calls import close, observe_plain

_local = threading.local()
_lock = threading.Lock()
_handles: list[RemovableHandle] = []
_users = 0


def this_thread() -> ThreadState:
    """The state of the current thread."""
    if not hasattr(_local, "thread"):
        thread = ThreadState()
        thread.mode = FunctionMode(thread)
        _local.thread = thread
    return _local.thread


def _install() -> None:
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _handles.append(nn.modules.module.register_module_forward_pre_hook(_before))
            _handles.append(nn.modules.module.register_module_forward_hook(_after, with_kwargs=True, always_call=True))


def _uninstall() -> None:
    global _users
    with _lock:
        _users -= 1
        while not _users and _handles:
            handle = _handles.pop()
            handle.remove()
            forget_global_hook(handle.id)


def _before(module: nn.Module, args: Args) -> None:
    thread: ThreadState | None = getattr(_local, "thread", None)
    if thread is None or not thread.watches:
        return
    if thread.compiled:
        hand_on_compiled(thread)
    if thread.plain is not None:
        # Another hook's exception hid its end; or it calls this module (a gated norm).
        thread.end_plain()
    if not thread.stack and not is_compiling():
        # (A global hook gets no keyword arguments, but torch's function that calls it has them.)
        with DisableTorchFunction():
            thread.traces.given(*tree_leaves((args, sys._getframe(1).f_locals.get("kwargs"))))
    if is_plain(module, thread.traces) and not (thread.editors and is_in_backward()):
        thread.begin_plain(module)
        return
    thread.stack.append(RunningModule(module, thread.taken, thread.hidden))
    if thread.editors and is_in_backward():
        thread.begin_recomputation()
    may_hide = isinstance(module, TORCHS) and thread.may_hide(module)
    if may_hide != thread.hidden:
        thread.hide(may_hide)
    for watch in thread.watches:
        watch.entered(module)


def _after(module: nn.Module, args: Args, *rest: Any) -> Any:
    """End a module's forward; `rest` is (keyword arguments, output) if it returned, and (None,) if it raised.

    Returns:
        The output in place of the module's; None keeps it.
    """
    thread: ThreadState | None = getattr(_local, "thread", None)
    if thread is None:
        return None
    if thread.plain is not None:
        is_this = thread.plain is module
        try:
            if is_this and len(rest) == 2:
                # Our mode is still off: it would see each function of a tensor here.
                observe_plain(thread, module, args, rest[1])
        finally:
            thread.end_plain()
        if is_this:
            return None
    return _end(thread, module, args, *rest) if thread.stack else None


def _end(thread: ThreadState, module: nn.Module, args: Args, *rest: Any) -> Any:
    # Another hook's exception may have left modules on the stack, or kept this one off it.
    if thread.stack[-1].module is not module and not any(frame.module is module for frame in thread.stack):
        return None
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
    return thread.left(module, rest[1] if len(rest) == 2 else None)


def _finish(thread: ThreadState, frame: RunningModule, args: Args, kwargs: Kwargs, output: Any) -> None:
    module = frame.module
    if isinstance(module, TORCHS):
        forward = forward_of(module)
        if (observe := MODULES.get(forward)) is not None:
            thread.try_to(observe, thread, frame, module, args, kwargs, output)
        elif forward not in FUSED_FORWARDS and may_run_fused(module) and thread.taken == frame.taken:
            thread.unread(FUSED_SUBCLASS)
    if thread.taken == frame.taken and len(frame.convolutions) == 1:
        thread.give(frame.convolutions[0], module)
    if thread.taken == frame.taken and frame.convolutions:
        frame.mixes = CONVOLUTION
    if thread.taken == frame.taken and (how := "recurrence" if isinstance(module, nn.RNNBase) else frame.mixes):
        thread.mixed(module, how)
    if frame.pending or frame.is_in_blocks or thread.traces:
        thread.try_to(close, thread, frame)


FLA = ("gated_delta_rule", "kda", "delta_rule", "gla", "simple_gla", "retention", "lightning_attn", "rwkv7")
RECURRENCES = (
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention", "mamba2_chunk_scan", "mamba2_selective_state_update", "mamba_selective_scan",
    "mamba_selective_state_update", "causal_conv1d_fn", "causal_conv1d_update",
    *(f"{way}_{name}" for way in ("chunk", "fused_recurrent") for name in FLA),
)  # fmt: skip
"""Functions of transformers and fla that are recurrences or convolutions: torch shows their parts, which say little."""
LIGHTNING = ("slope_rate", "diagonal_decay", "qkv_proj", "act_fn", "output_gate", "norm", "out_proj")
"""The attributes of a module of lightning attention, which makes its recurrence in its own forward."""
Home = tuple[Any, str]
"""A Python module or a class, and the name of a function of it."""
_replaced: dict[Home, tuple[Callable[..., Any], int]] = {}
"""By place, the function that was there, and how many open watches replaced it."""


def _places(modules: Iterable[nn.Module]) -> list[Home]:
    modules = list(modules)
    homes = [sys.modules.get(home) for home in {kind.__module__ for one in modules for kind in type(one).__mro__}]
    found: list[Home] = [(home, name) for home in homes for name in RECURRENCES if hasattr(home, name)]
    lightning = {type(one) for one in modules if all(hasattr(one, name) for name in LIGHTNING)}
    owners = {next(one for one in kind.__mro__ if "forward" in vars(one)) for kind in lightning}
    return found + [(owner, "forward") for owner in owners]


def _replace(modules: Iterable[nn.Module]) -> list[Home]:
    """Replace the recurrences beside the classes of these modules, and those that are modules; return their places."""
    found = _places(modules)
    with _lock:
        for home, name in found:
            original, users = _replaced.get((home, name), (getattr(home, name), 0))
            if not users:
                setattr(home, name, _observing(original))
            _replaced[home, name] = original, users + 1
    return found


def _put_back(places: Iterable[Home]) -> None:
    """Put the functions back that no other open watch needs."""
    with _lock:
        for home, name in places:
            original, users = _replaced.pop((home, name))
            if users > 1:
                _replaced[home, name] = original, users - 1
            else:
                setattr(home, name, original)


def _observing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def observing(*args: Any, **kwargs: Any) -> Any:
        thread: ThreadState | None = None if is_compiling() else getattr(_local, "thread", None)
        if thread is None or not thread.watches or thread.is_reading:
            return original(*args, **kwargs)
        from regard.watching.readers.recurrent_calls import observe_recurrence

        return observe_recurrence(thread, original, args, kwargs)

    return observing


class OpenThreads:
    """The threads of an open watch, with the mark to leave each, and the functions that were replaced for it."""

    def __init__(self) -> None:
        self._open: dict[ThreadState, tuple[int, list[Home]]] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def enter(self, watch: Interceptor) -> ThreadState:
        """Open the watch in this thread; raises ArgumentError if it is open here: it would see every call twice."""
        thread = this_thread()
        if watch in thread.watches:
            raise ArgumentError(
                "this `with` is open in this thread already, and would see each call twice: open it once"
            )
        _install()
        places = _replace(watch.modules.values())
        self._open[thread] = thread.enter(watch), places
        return thread

    def leave(self, watch: Interceptor) -> ThreadState:
        """Close the watch in this thread; if it is not open here, in the thread of the last opening. A watched
        generator may end in another thread than it began in."""
        thread = this_thread()
        if thread in self._open:
            mark, places = self._open.pop(thread)
        else:
            thread, (mark, places) = self._open.popitem()
        thread.leave(watch, mark)
        _put_back(places)
        _uninstall()
        return thread

    @contextmanager
    def attach(self, watch: Interceptor, opened_by: str) -> Iterator[None]:
        """Open the interceptor in another thread too; raises ArgumentError if it is open in no thread, or in this one
        already."""
        if not self._open or watch in this_thread().watches:
            raise ArgumentError(
                f"attach() belongs into another thread than the one whose `with {opened_by}(...)` is open"
            )
        self.enter(watch)
        try:
            yield
        finally:
            self.leave(watch)
