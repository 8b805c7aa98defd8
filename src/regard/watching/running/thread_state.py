"""The state of each thread: its watches, the stack of running modules, and the calls it hands to the watches."""

import inspect
import sys
from collections.abc import Callable
from inspect import CO_VARARGS
from threading import get_ident
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.errors import FunctionError
from regard.tensors.guards import function_mode, function_modes
from regard.tensors.torch_private import graph_task_id, pop_function_mode, push_function_mode
from regard.watching.kept.arguments import ModuleArguments, running_arguments
from regard.watching.kept.sequences import Moment
from regard.watching.origins.streams import Streams
from regard.watching.origins.traces import SoftmaxOrigin, Traces
from regard.watching.running.module_kinds import may_run_fused
from regard.watching.running.observed_call import Interceptor, KeysChosen, ObservedCall


class RunningModule:
    __slots__ = (
        "arguments",
        "compares",
        "convolutions",
        "has_pairs",
        "holds_comparison",
        "is_in_blocks",
        "is_recomputed",
        "mixes",
        "module",
        "pending",
        "scans",
        "taken",
        "was_hidden",
    )

    def __init__(self, module: nn.Module, taken: int, was_hidden: bool) -> None:
        self.module = module
        self.taken = taken
        self.was_hidden = was_hidden
        self.arguments: ModuleArguments | None = None
        """Its small integer arguments."""
        self.pending: list[SoftmaxOrigin] = []
        """Softmaxes of this module that may become attention."""
        self.is_recomputed = False
        """True if our mode is on for this module alone, recomputed by a backward pass."""
        self.is_in_blocks = False
        """True if the module multiplied values with parts of a softmax."""
        self.compares = self.holds_comparison = False
        """True if it, or a part of it, multiplied activations with activations, as queries with keys."""
        self.has_pairs = False
        """True if such a product gave a number for each pair of positions; another one then mixes these."""
        self.convolutions: list[ObservedCall] = []
        """Its convolutions over positions: one alone is how the module mixes these."""
        self.scans = 0
        """How many recurrences of its own were read."""
        self.mixes = ""
        """How the module's own functions mix positions, as far as they were seen to."""


class ThreadState:
    """One thread: its watches, its stack of modules, and its function mode."""

    def __init__(self) -> None:
        self.watches: list[Interceptor] = []
        """The open interceptors of this thread, the outermost first."""
        self.editors: list[Interceptor] = []
        """Those with possible changes."""
        self.stack: list[RunningModule] = []
        self.plain: nn.Module | None = None
        """The running plain module. It has no frame, because most modules of a model are plain."""
        self._may_see = False
        """True if our mode has to return when the plain module ends."""
        self.taken = 0
        self.meant: nn.Module | None = None
        self.is_reading = False
        """True while a watch reads a call: its functions are not the model's."""
        self.mode: TorchFunctionMode
        """The mode that sees functions; set when the thread's state is made."""
        self.compiled: list[tuple[tuple[Any, ...], Tensor]] = []
        """The arguments and outputs of compiled FlexAttention calls still to be passed on."""
        self.hidden = False
        self.traces = Traces()
        self.streams = Streams()
        self.handed: set[int] = set()
        """The addresses of the outputs of calls of FlexAttention seen as they ran."""

    def enter(self, watch: Interceptor) -> int:
        """Start reporting to an interceptor; gives the mark for `leave`."""
        # Another thread may have closed the last watch, and could not take the mode off this thread's stack.
        if not self.watches and not any(mode is self.mode for mode in function_modes()):
            push_function_mode(self.mode)
        self.watches.append(watch)
        if watch.changes:
            self.editors.append(watch)
        return len(self.stack)

    def leave(self, watch: Interceptor, mark: int) -> None:
        if len(self.stack) > mark:
            was_hidden = self.stack[mark].was_hidden
            del self.stack[mark:]
            self.hide(was_hidden)
        self.watches.remove(watch)
        if watch.changes:
            self.editors.remove(watch)
        if not self.watches:
            # The stack of modes belongs to the running thread. In another thread our mode stays where it is, inactive.
            take_out(self.mode)
            self.hidden, self.plain = False, None
            self.traces, self.streams = Traces(), Streams()
            self.compiled.clear()

    def hide(self, hidden: bool) -> None:
        """Take our function mode off torch's stack, or put it back. torch runs its layers fused only if no function
        mode is active. If a mode of the user lies above ours, they do not run fused anyway, and ours can stay."""
        if hidden and not self.hidden and function_mode() is self.mode:
            pop_function_mode()
            self.hidden = True
        elif not hidden and self.hidden:
            push_function_mode(self.mode)
            self.hidden = False

    def begin_plain(self, module: nn.Module) -> None:
        self.plain, self._may_see = module, not self.hidden
        if self._may_see:
            self.hide(True)

    def end_plain(self) -> None:
        self.plain = None
        if self._may_see:
            self.hide(False)

    def begin_recomputation(self) -> None:
        """Put our mode on for a module recomputed in a backward pass: torch turns it off there."""
        if not self.hidden and not any(mode is self.mode for mode in function_modes()):
            self.stack[-1].is_recomputed = True
            push_function_mode(self.mode)

    def may_hide(self, module: nn.Module) -> bool:
        """True if our mode has to be off while a module runs: torch may run it fused, and it is not edited."""
        if self.editors and any(id(module) in editor.unfused for editor in self.editors):
            return False
        return may_run_fused(module)

    def begun(self, watch: Interceptor) -> int | None:
        return next((frame.taken for frame in self.stack if watch.paths.get(id(frame.module)) == ""), None)

    def path(self, watch: Interceptor) -> str | None:
        """The path of the innermost running module the watch knows; None outside its model. The module is found as the
        first argument of a running method, so a decoder's step counts like a call."""
        if self.meant is not None:
            return watch.paths.get(id(self.meant))
        running: FrameType | None = _frame_of_model(sys._getframe(1))
        while running is not None:
            if (path := watch.paths.get(id(_owner(running)))) is not None:
                return path
            running = running.f_back
        return None

    def moment(self, watch: Interceptor) -> Moment:
        return Moment(get_ident(), self.taken, self.begun(watch))

    def before(self) -> list[object]:
        found = []
        for editor in self.editors:
            path = self.path(editor)
            if path is not None and (change := editor.before(path, self.moment(editor))) is not None:
                found.append(change)
        return found

    def give(self, source: ObservedCall, module: nn.Module | None = None) -> None:
        self.taken += 1
        source.arguments = tuple(running_arguments(self.stack))
        self.meant, self.is_reading = module, True
        try:
            for watch in tuple(self.watches):
                watch.after(self.path(watch), source, self.moment(watch))
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

    def unread(self, reason: str, module: nn.Module | None = None) -> None:
        for watch, path in self._where(module):
            watch.unread(path, reason)

    def refuse(self, frame: RunningModule, reason: str) -> None:
        for watch in self.watches:
            watch.refuse(frame.module, frame.taken, reason)

    def other(self, reason: str, module: nn.Module | None = None) -> None:
        for watch, path in self._where(module):
            watch.other(path, reason)

    def _where(self, module: nn.Module | None) -> list[tuple[Interceptor, str]]:
        self.meant = module
        found = [(watch, path) for watch in self.watches if (path := self.path(watch)) is not None]
        self.meant = None
        return found

    def withdraw(self, token: object, reason: str) -> None:
        for watch in self.watches:
            watch.withdraw(token, reason)

    def innermost(self) -> RunningModule | None:
        """The running module whose code this is; an nn.Softmax is passed over, because the module around calls it."""
        frames = [frame for frame in self.stack[-2:] if not isinstance(frame.module, nn.Softmax)]
        return frames[-1] if frames else None

    def innermost_module(self) -> nn.Module | None:
        frame = self.innermost()
        return None if frame is None else frame.module

    def has_compared(self) -> bool:
        frame = self.innermost()
        return self.is_in_attention() or (frame is not None and frame.holds_comparison)

    def is_in_attention(self) -> bool:
        return any(frame.compares for frame in self.stack)

    def mixed(self, module: nn.Module, how: str, positions: int | None = None) -> None:
        for watch in self.watches:
            if (path := watch.paths.get(id(module))) is not None:
                watch.mixed(path, how, positions)

    def embedded(self, ids: Any, table: object) -> None:
        if isinstance(ids, Tensor):
            for watch in self.watches:
                watch.embedded(ids, id(table), self.taken)

    def chose(self, module: nn.Module, choice: KeysChosen, queries: int) -> None:
        for watch in self.watches:
            if (path := watch.paths.get(id(module))) is not None:
                watch.chose(choice._replace(module=path or "the model itself"), queries)


def _frame_of_model(running: FrameType | None) -> FrameType | None:
    """The innermost frame outside this package. Reading a frame's `self` would copy all its variables."""
    while running is not None and running.f_globals.get("__name__", "").startswith("regard.watching."):
        running = running.f_back
    return running


def _owner(running: FrameType) -> object:
    code, given = running.f_code, running.f_locals
    if "self" in given or not (code.co_argcount or code.co_flags & CO_VARARGS):
        return given.get("self")
    first = given.get(code.co_varnames[0 if code.co_argcount else code.co_kwonlyargcount])
    if not code.co_argcount:
        first = first[0] if isinstance(first, tuple) and first else None
    method = inspect.unwrap(getattr(type(first), code.co_name, _owner))
    is_method = code.co_name == "forward" or getattr(method, "__code__", None) is code
    return first if is_method else None


def is_in_backward() -> bool:
    """True during a backward pass, where modules run forward only for recomputation (checkpointing)."""
    return graph_task_id() != -1


def take_out(mode: TorchFunctionMode) -> None:
    """Take a mode off torch's stack, also from below modes entered after it."""
    above = []
    while (top := function_mode()) is not None and top is not mode:
        above.append(pop_function_mode())
    if top is mode:
        pop_function_mode()
    for other in reversed(above):
        push_function_mode(other)
