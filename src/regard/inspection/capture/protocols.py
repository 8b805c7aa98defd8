"""The interfaces between a thread and its watches: what observes functions and modules, and what is told of calls."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.inspection.capture.module_kinds import calls_super, forward_of
from regard.inspection.capture.observed_call import ObservedCall

if TYPE_CHECKING:
    from regard.inspection.capture.thread_state import RunningModule, ThreadState

FunctionObserver = Callable[["ThreadState", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Takes (thread, function, args, kwargs), runs the function for the model, and hands what it saw to the thread."""

ModuleObserver = Callable[["ThreadState", "RunningModule", nn.Module, tuple[Any, ...], dict[str, Any], Any], None]
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
    plain: "Callable[[ThreadState, nn.Module, tuple[Any, ...], Any], None]"
    """Observes a plain module, in which no function was seen, after it has run."""
    compiled: "Callable[[ThreadState, tuple[Any, ...], Tensor, nn.Module | None], None]"
    """Called with the arguments and the output of FlexAttention's operator, if it ran compiled in a module."""
    close: "Callable[[ThreadState, RunningModule], None]"
    """Called when a module ends, before it is taken off the stack."""

    def may_run_fused(self, module: nn.Module) -> bool:
        """Whether torch may run one of `TORCHS` in one operator, which it does only if no function mode is active."""
        forward = forward_of(module)
        if forward not in self.modules and not calls_super(forward):
            return False
        takes_gradients = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        return not (module.training or takes_gradients)


def _run(thread: "ThreadState", func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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

    def left(self, thread: "ThreadState", module: nn.Module, output: Any) -> Any:
        """Called when the forward of a module has ended, with its output, or None if it raised.

        What is handed back goes on in the place of the output; None leaves the output as it is.
        """

    def take(self, thread: "ThreadState", source: ObservedCall) -> None:
        """Called with each attention call that was observed."""

    def unread(self, thread: "ThreadState", reason: str) -> None:
        """Called if a running module does something like attention that cannot be read."""

    def refuse(self, thread: "ThreadState", frame: "RunningModule") -> None:
        """Called when a module ends that attended in blocks: none of its softmaxes is a map by itself."""

    def other(self, thread: "ThreadState", reason: str) -> None:
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

    def wants(self, thread: "ThreadState") -> object | None:
        """What those functions need to know of the call that the running module makes; None if it is not edited."""
