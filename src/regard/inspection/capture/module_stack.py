"""The stack of modules that each thread is running, and the watches that observe it.

Two global hooks keep a stack of the modules whose forward is running, one stack for each thread. The hooks are
global because torch does not run an encoder layer fused if the layer has hooks of its own: it would then run
slower, and its output would differ in its last bits.
"""

import sys
import threading
import types
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from regard.errors import ArgumentError, FunctionError, RegardError
from regard.inspection.capture.observed_call import ObservedCall
from regard.inspection.capture.provenance import SoftmaxOrigin, Traces
from regard.torch_private import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    flex_attention_operator,
    forget_global_hook,
    get_function_mode,
    get_function_modes,
    graph_task_id,
    has_pre_hooks,
    pop_function_mode,
    push_function_mode,
)

FunctionObserver = Callable[["Thread", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Takes (thread, function, args, kwargs), runs the function for the model, and hands what it saw to the thread."""
ModuleObserver = Callable[["Thread", "Frame", nn.Module, tuple[Any, ...], dict[str, Any], Any], None]
"""Takes (thread, frame, module, args, kwargs, output) of a module whose forward has returned."""


class Observers(NamedTuple):
    """The observers of functions and of modules."""

    functions: Mapping[object, FunctionObserver]
    modules: Mapping[object, ModuleObserver]
    """The keys are forward functions, so that a subclass with a forward of its own is not mistaken for its base."""
    by_name: Mapping[str, FunctionObserver]
    """The same functions by name, for operators of torch (`torch.ops.aten.NAME`)."""
    operators: FunctionObserver
    """Observes `torch.ops.*`: torch's own functions under other names, and operators that nobody can look into."""
    traced: FunctionObserver
    """Observes every other function while a tensor is traced."""
    plain: "Callable[[Thread, nn.Module, tuple[Any, ...], Any], None]"
    """Observes a plain module, in which no function was seen, after it has run."""
    compiled: "Callable[[Thread, tuple[Any, ...], Tensor, nn.Module | None], None]"
    """Called with the arguments and the output of FlexAttention's operator, if it ran compiled in a module."""
    close: "Callable[[Thread, Frame], None]"
    """Called when a module ends, before it is taken off the stack."""

    def may_run_fused(self, module: nn.Module) -> bool:
        """Whether torch may run one of `TORCHS` in one operator, which it does only if no function mode is active."""
        forward = forward_of(module)
        if forward not in self.modules and not _calls_super(forward):
            return False
        takes_gradients = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        return not (module.training or takes_gradients)


def _run(thread: "Thread", func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _ignore(*anything: Any) -> None:
    """Observe nothing."""


NO_OBSERVERS = Observers({}, {}, {}, _run, _run, _ignore, _ignore, _ignore)
"""The observers of a thread without a watch."""


class Watcher(Protocol):
    """The methods of a watch that a thread calls."""

    paths: dict[int, str]
    """The path of each module of the model, by the module's id."""

    @property
    def keeps_graph(self) -> bool:
        """Whether its maps carry gradients."""

    def entered(self, module: nn.Module) -> None:
        """Called when the forward of a module begins."""

    def left(self, thread: "Thread", module: nn.Module, output: Any) -> Any:
        """Called when the forward of a module has ended, with its output, or None if it raised.

        What is handed back goes on in the place of the output; None leaves the output as it is.
        """

    def take(self, thread: "Thread", source: ObservedCall) -> None:
        """Called with each attention call that was observed."""

    def unread(self, thread: "Thread", reason: str) -> None:
        """Called if a running module does something like attention that cannot be read."""

    def refuse(self, thread: "Thread", frame: "Frame") -> None:
        """Called when a module ends that attended in blocks: none of its softmaxes is a map by itself."""

    def other(self, thread: "Thread", reason: str) -> None:
        """Called if a running module does something that looks like attention and is none."""

    def withdraw(self, token: object, reason: str) -> None:
        """Called if a call that was taken turns out to be no attention."""


class Editor(Watcher, Protocol):
    """A watch that changes calls before they run."""

    functions: Mapping[object, FunctionObserver]
    """The functions that can be edited, each with what runs it edited. It hands to the watches what it ran."""
    unfused: frozenset[int]
    """The ids of the modules that must not run fused, because attention inside them is edited."""
    refusal: RegardError | None
    """Why a module that ran cannot be edited; it is raised when that module ends."""

    def wants(self, thread: "Thread") -> object | None:
        """What those functions need to know of the call that the running module makes; None if it is not edited."""


class Frame:
    """A module whose forward is running."""

    __slots__ = ("is_in_blocks", "is_recomputed", "module", "pending", "taken", "was_hidden")

    def __init__(self, module: nn.Module, taken: int, was_hidden: bool) -> None:
        self.module = module
        self.taken = taken
        self.was_hidden = was_hidden
        self.pending: list[SoftmaxOrigin] = []
        """Softmaxes of this module that may turn out to be attention."""
        self.is_recomputed = False
        """Whether our mode is on for this module alone, which a backward pass runs again."""
        self.is_in_blocks = False
        """Whether the module multiplied values with parts of a softmax."""


class Thread:
    """One thread: its watches, its stack of modules, and the mode through which it sees functions called."""

    def __init__(self) -> None:
        self.watches: list[Watcher] = []
        self.editors: list[Editor] = []
        """Those of the watches that edit, the outermost first."""
        self.stack: list[Frame] = []
        self.plain: nn.Module | None = None
        """The plain module that is running. It has no frame, because most modules of a model are plain."""
        self._may_see = False
        """Whether our mode has to be put back when the plain module ends."""
        self.taken = 0
        self.meant: nn.Module | None = None
        self.is_reading = False
        """Whether a watch reads a call now: the functions that it calls are not the model's."""
        self.mode = _Functions(self)
        self.hidden = False
        self.observers = NO_OBSERVERS
        self.traces = Traces()
        self.handed: set[int] = set()
        """The addresses of the outputs of calls of FlexAttention that were seen as they ran."""

    def enter(self, watch: Watcher, observers: Observers) -> int:
        """Begin to report to a watch. The observers of the first watch serve all watches of the thread.

        Returns:
            The mark that `leave` needs.
        """
        if not self.watches:
            self.observers = observers
            _install()
            # Another thread may have closed the last watch, and could not take the mode off this thread's stack.
            if not any(mode is self.mode for mode in get_function_modes()):
                push_function_mode(self.mode)
        self.watches.append(watch)
        return len(self.stack)

    def leave(self, watch: Watcher, mark: int) -> None:
        """Stop reporting to a watch, and remove the modules that an interrupt left on the stack."""
        if len(self.stack) > mark:
            was_hidden = self.stack[mark].was_hidden
            del self.stack[mark:]
            self.hide(was_hidden)
        self.watches.remove(watch)
        if not self.watches:
            # The stack of modes is that of the running thread. If it is another, our mode stays where it is, and rests.
            _take_out(self.mode)
            self.hidden, self.plain = False, None
            self.traces.clear()
            self.mode.compiled.clear()
            _uninstall()

    def hide(self, hidden: bool) -> None:
        """Take our function mode off torch's stack, or put it back.

        torch runs its layers fused only if no function mode is active. If a mode of the user lies above ours, they
        do not run fused anyway, and ours can stay.
        """
        if hidden and not self.hidden and get_function_mode() is self.mode:
            pop_function_mode()
            self.hidden = True
        elif not hidden and self.hidden:
            push_function_mode(self.mode)
            self.hidden = False

    def begin_plain(self, module: nn.Module) -> None:
        """Run a plain module, without our mode."""
        self.plain, self._may_see = module, not self.hidden
        if self._may_see:
            self.hide(True)

    def end_plain(self) -> None:
        """The plain module has ended."""
        self.plain = None
        if self._may_see:
            self.hide(False)

    def begin_recomputation(self) -> None:
        """Put our mode on for a module that a backward pass runs again: torch has it off in functions that it handles,
        of which a backward pass is one.
        """
        if not self.hidden and not any(mode is self.mode for mode in get_function_modes()):
            self.stack[-1].is_recomputed = True
            push_function_mode(self.mode)

    def may_hide(self, module: nn.Module) -> bool:
        """Whether our mode has to be off while a module runs: torch may run it fused, and nobody edits it."""
        if self.editors and any(id(module) in editor.unfused for editor in self.editors):
            return False
        return self.observers.may_run_fused(module)

    def begun(self, watch: Watcher) -> int | None:
        """How many calls had been observed when the watch's model was called; None if it is not the model that runs."""
        return next((frame.taken for frame in self.stack if watch.paths.get(id(frame.module)) == ""), None)

    def path(self, watch: Watcher) -> str | None:
        """The path of the innermost running module that the watch knows; None outside its model.

        The module is found as the `self` of a running function, so that a method (a decoder's step) counts like a call.
        """
        if self.meant is not None:
            return watch.paths.get(id(self.meant))
        running: FrameType | None = _frame_of_model(sys._getframe(1))
        while running is not None:
            if (path := watch.paths.get(id(running.f_locals.get("self")))) is not None:
                return path
            running = running.f_back
        return None

    def give(self, source: ObservedCall, module: nn.Module | None = None) -> None:
        """Hand a call to every watch, as a call of the running module or of `module`."""
        self.taken += 1
        self.meant, self.is_reading = module, True
        try:
            for watch in tuple(self.watches):
                watch.take(self, source)
        finally:
            self.meant, self.is_reading = None, False

    def try_to(self, observe: Callable[..., Any], *args: Any) -> None:
        """Observe without ever disturbing the model: an error goes to the report, but one of the user's function."""
        try:
            observe(*args)
        except FunctionError:
            raise
        except Exception as error:
            self.unread(f"{type(error).__name__}: {error}")

    def left(self, module: nn.Module, output: Any) -> Any:
        """Tell every watch that a module has ended; returns what a watch puts in the place of its output."""
        changed = None
        for watch in tuple(self.watches):
            handed = watch.left(self, module, output if changed is None else changed)
            changed = changed if handed is None else handed
        return changed

    def unread(self, reason: str, module: nn.Module | None = None) -> None:
        """Tell every watch that something cannot be read, in the running module or in `module`."""
        self.meant = module
        for watch in self.watches:
            watch.unread(self, reason)
        self.meant = None

    def refuse(self, frame: Frame) -> None:
        """Tell every watch that a module attended in blocks."""
        for watch in self.watches:
            watch.refuse(self, frame)

    def other(self, reason: str, module: nn.Module | None = None) -> None:
        """Tell every watch that something only looked like attention, in the running module or in `module`."""
        self.meant = module
        for watch in self.watches:
            watch.other(self, reason)
        self.meant = None

    def withdraw(self, token: object, reason: str) -> None:
        """Tell every watch that a call that it took is no attention."""
        for watch in self.watches:
            watch.withdraw(token, reason)

    def hand_on(self) -> None:
        """Hand on what compiled calls have left, as calls of the running module."""
        calls, module = list(self.mode.compiled), self.stack[-1].module if self.stack else None
        self.mode.compiled.clear()
        # What torch runs without compiling it for good is recorded too, and was seen already.
        calls = [(args, output) for args, output in calls if output.data_ptr() not in self.handed]
        self.handed.clear()
        for args, output in calls:
            if module is not None:
                self.try_to(self.observers.compiled, self, args, output, module)

    def innermost(self) -> Frame | None:
        """The running module whose code this is; an nn.Softmax is passed over, because the module around calls it."""
        frames = [frame for frame in self.stack[-2:] if not isinstance(frame.module, nn.Softmax)]
        return frames[-1] if frames else None

    def innermost_module(self) -> nn.Module | None:
        """The module of that frame."""
        frame = self.innermost()
        return None if frame is None else frame.module

    def is_in_attention(self) -> bool:
        """Whether a running module looks like attention."""
        return any(looks_like_attention(frame.module) for frame in self.stack)


def _frame_of_model(running: FrameType | None) -> FrameType | None:
    """The innermost frame that is not ours: to ask a frame for its `self` copies all that it holds."""
    while running is not None and running.f_globals.get("__name__", "").startswith("regard.inspection."):
        running = running.f_back
    return running


class Entries:
    """The threads in which one watch is open, and the mark that each needs to leave it."""

    def __init__(self) -> None:
        self._open: dict[Thread, int] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def enter(self, watch: Watcher, observers: Observers) -> Thread:
        """Open the watch in this thread.

        Raises:
            ArgumentError: it is open here already, and would see every call twice.
        """
        thread = this_thread()
        if watch in thread.watches:
            raise ArgumentError(
                "this `with` is open in this thread already, and would see each call twice: open it once"
            )
        self._open[thread] = thread.enter(watch, observers)
        return thread

    def leave(self, watch: Watcher) -> Thread:
        """Close the watch in this thread; if it is not open here, where it was opened last.

        A generator that is watched may be ended by another thread than the one that began it.
        """
        thread = this_thread()
        if thread in self._open:
            mark = self._open.pop(thread)
        else:
            thread, mark = self._open.popitem()
        thread.leave(watch, mark)
        return thread


OPERATORS = (OpOverload, OpOverloadPacket, HigherOrderOperator)
"""The kinds of functions that are operators of torch or of somebody else."""

NATIVE = frozenset({
    types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType,
    types.WrapperDescriptorType,
})  # fmt: skip
"""The kinds of functions that are none: those of torch and of its tensors, and whatever is written in Python.

To ask for the kind takes a tenth of the time that `isinstance` takes with the classes of operators.
"""


class _Functions(TorchFunctionMode):
    """Hands the functions that have an observer to it, in place of running them."""

    def __init__(self, thread: Thread) -> None:
        super().__init__()
        self._thread = thread
        self.compiled: list[tuple[tuple[Any, ...], Tensor]] = []
        """The arguments and outputs of compiled calls of FlexAttention, which were not handed on yet."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            result = func(*args, **(kwargs or {}))
            if func is flex_attention_operator:
                # torch's compiler traces this line too: its code will do so after each run of the kernel. The other
                # results must not be asked for, because a kernel that returns them is another one.
                self.compiled.append((args, result[0]))
            return result
        thread = self._thread
        observe = thread.observers.functions.get(func)
        if observe is None and type(func) in NATIVE and not thread.traces.alive and not thread.editors:
            # Most functions go this way: each line here is run some hundred times in a small model.
            return func(*args, **kwargs) if kwargs else func(*args)
        if thread.is_reading or not thread.watches:
            return func(*args, **(kwargs or {}))
        if thread.editors and (edit := thread.editors[0].functions.get(func)) is not None:
            return edit(thread, func, args, kwargs or {})
        if observe is None:
            if isinstance(func, OPERATORS):
                observe = thread.observers.operators
            elif thread.traces:
                observe = thread.observers.traced
            else:
                return func(*args, **(kwargs or {}))
        return observe(thread, func, args, kwargs or {})


def is_in_backward() -> bool:
    """Whether a backward pass is running, in which modules run forward only to be recomputed (checkpointing)."""
    return graph_task_id() != -1


def is_plain(module: nn.Module, traces: Traces) -> bool:
    """Whether a module calls no function that has an observer, so that it can run without our mode.

    What a module of torch makes of a traced tensor is found afterwards; those of transformers then run under our mode.
    """
    kind = type(module)
    if kind not in PLAIN and (traces.alive or not is_known(kind.__module__, kind.__name__)):
        return False
    return not has_pre_hooks(module) and "forward" not in module.__dict__


def forward_of(module: nn.Module) -> object:
    """The function that a module's class runs as `forward`; None for a TorchScript module, whose class has none."""
    return getattr(type(module), "forward", None)


def _calls_super(function: object) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and "__class__" in code.co_freevars


def looks_like_attention(module: nn.Module) -> bool:
    """Whether the name of a module's class says that it attends."""
    name = type(module).__name__.lower()
    return ("attention" in name or "attn" in name) and any(True for _ in module.parameters())


FUSED_SUBCLASS = (
    "torch may have run it fused, and its own forward says nothing of queries and keys: watch it with gradients on, "
    "or in train() mode, where it is not fused"
)
"""The report's reason for subclasses of torch's layers that call the forward of their base."""

TORCHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""The modules that torch may run fused."""

PLAIN = frozenset({
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Dropout, nn.Identity, nn.Conv1d, nn.Conv2d,
    nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh, nn.Sigmoid,
})  # fmt: skip
"""Modules of torch that are frequent and do not attend.

They run without our mode, because the mode costs some microseconds for each function that it sees.
"""

TRANSPOSED_LINEAR = "transformers.pytorch_utils", "Conv1D"


@lru_cache(maxsize=1024)
def is_known(place: str, name: str) -> bool:
    """Whether a class of transformers, by its module and its name, is as plain: its norms, activations and projections.

    Each of them calls three to eight functions, which together are half of those that a model calls.

    >>> is_known("transformers.models.llama.modeling_llama", "LlamaRMSNorm"), is_known("mine", "LlamaRMSNorm")
    (True, False)
    """
    is_norm = place.startswith("transformers.models.") and name.endswith("RMSNorm")
    return is_norm or place == "transformers.activations" or (place, name) == TRANSPOSED_LINEAR


_local = threading.local()
_lock = threading.Lock()
_handles: list[RemovableHandle] = []
_users = 0


def this_thread() -> Thread:
    """The state of the current thread."""
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
            forget_global_hook(handle.id)


def _before(module: nn.Module, args: tuple[Any, ...]) -> None:
    thread: Thread | None = getattr(_local, "thread", None)
    if thread is None or not thread.watches:
        return
    if thread.mode.compiled:
        thread.hand_on()
    if thread.plain is not None:
        # An exception in another hook has kept us from seeing its end; or it calls this module (a gated norm).
        thread.end_plain()
    if is_plain(module, thread.traces) and not (thread.editors and is_in_backward()):
        thread.begin_plain(module)
        return
    thread.stack.append(Frame(module, thread.taken, thread.hidden))
    if thread.editors and is_in_backward():
        thread.begin_recomputation()
    may_hide = isinstance(module, TORCHS) and thread.may_hide(module)
    if may_hide != thread.hidden:
        thread.hide(may_hide)
    for watch in thread.watches:
        watch.entered(module)


def _after(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
    """End a module's forward; `rest` is (keyword arguments, output) if it returned, and (None,) if it raised.

    Returns:
        What goes on in the place of the output; None if the output does.
    """
    thread: Thread | None = getattr(_local, "thread", None)
    if thread is None:
        return None
    if thread.plain is not None:
        is_this = thread.plain is module
        try:
            if is_this and len(rest) == 2:
                # Our mode is still off: it would see each question that is asked of a tensor here.
                thread.observers.plain(thread, module, args, rest[1])
        finally:
            thread.end_plain()
        if is_this:
            return None
    return _end(thread, module, args, *rest) if thread.stack else None


def _end(thread: Thread, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
    """End a module that has a frame."""
    # An exception in another hook may have left modules on the stack, or may have kept this one from it.
    if thread.stack[-1].module is not module and not any(frame.module is module for frame in thread.stack):
        return None
    while thread.stack[-1].module is not module:
        thread.stack.pop()
    frame = thread.stack[-1]
    if thread.mode.compiled:
        thread.hand_on()
    try:
        if len(rest) == 2:
            _finish(thread, frame, args, *rest)
    finally:
        thread.stack.pop()
        if frame.was_hidden != thread.hidden:
            thread.hide(frame.was_hidden)
        if frame.is_recomputed:
            _take_out(thread.mode)
    if len(rest) == 2:
        for editor in thread.editors:
            if editor.refusal is not None:
                refusal, editor.refusal = editor.refusal, None
                raise refusal
    return thread.left(module, rest[1] if len(rest) == 2 else None)


def _finish(thread: Thread, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Observe a module whose forward has returned."""
    module = frame.module
    if isinstance(module, TORCHS):
        observe = thread.observers.modules.get(forward_of(module))
        if observe is not None:
            thread.try_to(observe, thread, frame, module, args, kwargs, output)
        elif thread.observers.may_run_fused(module) and thread.taken == frame.taken:
            thread.unread(FUSED_SUBCLASS)
    if frame.pending or frame.is_in_blocks or thread.traces:
        thread.try_to(thread.observers.close, thread, frame)


def _take_out(mode: TorchFunctionMode) -> None:
    """Take a mode off torch's stack, also from below modes that were entered after it."""
    above = []
    while (top := get_function_mode()) is not None and top is not mode:
        above.append(pop_function_mode())
    if top is mode:
        pop_function_mode()
    for other in reversed(above):
        push_function_mode(other)
