"""Where a thread is inside a model, and who is watching it there.

Two global hooks keep a stack of the modules whose forward is running, one stack for each thread. Global
hooks, since torch's fused encoder layers give way to slower ones with other bits where a module has hooks
of its own.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode
from torch.utils.hooks import RemovableHandle

from regard.inspection.capture.observed_call import ObservedCall

FunctionObserver = Callable[["Thread", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Runs a function (thread, function, args, kwargs) in its own place, and hands what it saw to the thread."""
ModuleObserver = Callable[["Thread", "Frame", nn.Module, tuple[Any, ...], dict[str, Any], Any], None]
"""Is told of a module whose forward came to its end: (thread, frame, module, args, kwargs, output)."""


class Observers(NamedTuple):
    """Who observes what."""

    functions: Mapping[object, FunctionObserver]
    modules: Mapping[object, ModuleObserver]
    """By the forward function itself, so that a subclass with its own is not mistaken for its base."""

    def may_run_fused(self, module: nn.Module) -> bool:
        """Whether torch may run the module in one operator, if no mode is active: then none may be."""
        if not isinstance(module, TORCHS):
            return False
        forward = forward_of(module)
        if forward not in self.modules and not _calls_super(forward):
            return False
        takes_gradients = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        return not (module.training or takes_gradients)


class Watcher(Protocol):
    """What a thread asks of the watches that it serves."""

    paths: dict[int, str]

    def entered(self, module: nn.Module) -> None:
        """A module's forward begins."""

    def take(self, thread: "Thread", source: ObservedCall) -> None:
        """A call of attention was observed."""

    def unread(self, thread: "Thread", frame: "Frame | None", reason: str) -> None:
        """Something like attention was observed in a running module that cannot be read, nor what belongs to it."""


class Frame:
    """A module whose forward is running."""

    __slots__ = ("module", "pending", "taken", "was_hidden")

    def __init__(self, module: nn.Module, taken: int, was_hidden: bool) -> None:
        self.module = module
        self.taken = taken
        self.was_hidden = was_hidden
        self.pending: list[Tensor] = []
        """Softmax results that may turn out to be attention."""


class Thread:
    """One thread: its watches, its stack of modules, and the mode through which it sees functions called."""

    def __init__(self) -> None:
        self.watches: list[Watcher] = []
        self.stack: list[Frame] = []
        self.taken = 0
        self.meant: nn.Module | None = None
        self.mode = _Functions(self)
        self.hidden = False
        self.observers = Observers({}, {})

    def enter(self, watch: Watcher, observers: Observers) -> int:
        """Serve a watch by those observers, which serve all watches of a thread; the answer is the mark to leave with.

        A second watch is served by the first one's observers.
        """
        if not self.watches:
            self.observers = observers
            _install()
            _push_mode(self.mode)
        self.watches.append(watch)
        return len(self.stack)

    def leave(self, watch: Watcher, mark: int) -> None:
        """Serve it no longer, and forget what an interrupt left on the stack."""
        if len(self.stack) > mark:
            was_hidden = self.stack[mark].was_hidden
            del self.stack[mark:]
            self.hide(was_hidden)
        self.watches.remove(watch)
        if not self.watches:
            _take_out(self.mode)
            self.hidden = False
            _uninstall()

    def hide(self, hidden: bool) -> None:
        """Take the mode out of sight, or show it again.

        torch takes its fused layers only where no mode is active. Under a mode of the user's own it does not
        take them anyway, so that this one can stay.
        """
        if hidden and not self.hidden and _get_current_function_mode() is self.mode:
            _pop_mode()
            self.hidden = True
        elif not hidden and self.hidden:
            _push_mode(self.mode)
            self.hidden = False

    def path(self, watch: Watcher) -> str | None:
        """The name of the innermost running module that the watch knows; None outside its model.

        It is the `self` of a function that is running, so that a method (a decoder's step) counts as a call does.
        """
        if self.meant is not None:
            return watch.paths.get(id(self.meant))
        running: FrameType | None = sys._getframe(1)
        while running is not None:
            if (path := watch.paths.get(id(running.f_locals.get("self")))) is not None:
                return path
            running = running.f_back
        return None

    def give(self, source: ObservedCall, module: nn.Module | None = None) -> None:
        """Hand a call to every watch, as the running module's or as another's."""
        self.taken += 1
        self.meant = module
        try:
            for watch in tuple(self.watches):
                watch.take(self, source)
        finally:
            self.meant = None

    def try_to(self, observe: Callable[..., Any], *args: Any) -> None:
        """Observe, without ever disturbing the model: what goes wrong is told in the report."""
        try:
            observe(*args)
        except Exception as error:
            self.unread(self.stack[-1] if self.stack else None, f"{type(error).__name__}: {error}")

    def unread(self, frame: Frame | None, reason: str) -> None:
        """Tell every watch of what cannot be read."""
        for watch in self.watches:
            watch.unread(self, frame, reason)


class _Functions(TorchFunctionMode):
    """Hands the functions that somebody observes to their observers."""

    def __init__(self, thread: Thread) -> None:
        super().__init__()
        self._thread = thread

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        observe = self._thread.observers.functions.get(func)
        if observe is None or torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        return observe(self._thread, func, args, kwargs or {})


def is_plain(module: nn.Module) -> bool:
    """Whether a module calls nothing that anybody observes, so that it runs as if there were no watch."""
    return type(module) in PLAIN and not module._forward_pre_hooks and "forward" not in module.__dict__


def forward_of(module: nn.Module) -> object:
    """The function that a module's class runs as `forward`; None of a TorchScript module, whose class has none."""
    return getattr(type(module), "forward", None)


def _calls_super(function: object) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and "__class__" in code.co_freevars


def looks_like_attention(module: nn.Module) -> bool:
    """Whether a module's class says that it attends."""
    name = type(module).__name__.lower()
    return ("attention" in name or "attn" in name) and any(True for _ in module.parameters())


FUSED_SUBCLASS = (
    "torch may have run it fused, and its own forward says nothing of queries and keys: watch it with gradients on, "
    "or in train() mode, where it is not fused"
)
"""Said of subclasses of torch's layers that call their base's forward."""

TORCHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""The modules that torch may run fused."""

PLAIN = frozenset({
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Dropout, nn.Identity, nn.Conv1d, nn.Conv2d,
    nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh, nn.Sigmoid,
})  # fmt: skip
"""Modules of torch's that are many and do not attend: each function that is looked at costs some microseconds."""

_local = threading.local()
_lock = threading.Lock()
_handles: list[RemovableHandle] = []
_users = 0


def this_thread() -> Thread:
    """The current thread's own."""
    if not hasattr(_local, "thread"):
        _local.thread = Thread()
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
            # torch 2.13 leaves this entry behind, after which a compiled model warns of global hooks.
            nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)


def _before(module: nn.Module, args: tuple[Any, ...]) -> None:
    thread: Thread | None = getattr(_local, "thread", None)
    if thread is None or not thread.watches:
        return
    thread.stack.append(Frame(module, thread.taken, thread.hidden))
    if is_plain(module):
        thread.hide(True)
        return
    thread.hide(thread.observers.may_run_fused(module))
    for watch in thread.watches:
        watch.entered(module)


def _after(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
    """With (keyword arguments, output) after a forward that came to its end, with (None,) after one that raised."""
    thread: Thread | None = getattr(_local, "thread", None)
    if thread is None or not thread.stack:
        return
    # An exception in another's hook may have left modules on the stack, or may not have put this one there.
    if thread.stack[-1].module is not module and not any(frame.module is module for frame in thread.stack):
        return
    while thread.stack[-1].module is not module:
        thread.stack.pop()
    frame = thread.stack[-1]
    try:
        if len(rest) == 2 and not is_plain(module):
            _finish(thread, frame, args, *rest)
    finally:
        thread.stack.pop()
        thread.hide(frame.was_hidden)


def _finish(thread: Thread, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Observe a module whose forward came to its end."""
    module = frame.module
    if isinstance(module, TORCHS):
        observe = thread.observers.modules.get(forward_of(module))
        if observe is not None:
            thread.try_to(observe, thread, frame, module, args, kwargs, output)
        elif thread.observers.may_run_fused(module) and thread.taken == frame.taken:
            thread.unread(frame, FUSED_SUBCLASS)
    if frame.pending:
        _close(thread, frame)


def _close(thread: Thread, frame: Frame) -> None:
    """Hand what was not multiplied with values to the module outside, or say so where a module claims to attend."""
    if not looks_like_attention(frame.module):
        if len(thread.stack) > 1:
            thread.stack[-2].pending += frame.pending
        return
    for weights in frame.pending:
        reason = f"a softmax {tuple(weights.shape)} that is not multiplied with values as it stands (in blocks?)"
        thread.unread(frame, reason)


def _take_out(mode: TorchFunctionMode) -> None:
    """Take a mode off the stack, also from under those that were entered after it."""
    above = []
    while (top := _get_current_function_mode()) is not None and top is not mode:
        above.append(_pop_mode())
    if top is mode:
        _pop_mode()
    for other in reversed(above):
        _push_mode(other)
