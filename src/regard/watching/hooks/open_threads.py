"""The threads in which a watch is open. Compiled modules run uncompiled meanwhile: the observers see the calls of the
model's own code."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch

from regard.errors import ArgumentError
from regard.watching.hooks.module_hooks import install_hooks, remove_hooks
from regard.watching.hooks.named_functions import Home, late_kernels, put_functions_back, replace_functions
from regard.watching.hooks.observers import this_thread
from regard.watching.running.observed_call import Interceptor
from regard.watching.running.thread_state import ThreadState


class OpenThreads:
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
        install_hooks(watch)
        if watch.is_compiled:
            run_uncompiled()
        places = replace_functions(watch.modules.values())
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
        for kernel in late_kernels(watch.modules.values()):
            watch.unread("", f"{kernel} was loaded under the watch, which saw no call of it: load it before")
        thread.leave(watch, mark)
        put_functions_back(places)
        if watch.is_compiled:
            run_compiled()
        remove_hooks(watch)
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


_lock = threading.RLock()
_stances: list[AbstractContextManager[None]] = []
"""torch's stance while watches of compiled models are open, and a place for each further watch."""
HOOKS_RUN_TWICE = "Using `torch.compile"
"""The beginning of torch's warning that global hooks run for a compiled module too."""


def run_uncompiled() -> None:
    """Let compiled modules run uncompiled, in all threads. What was compiled stays, and is not compiled again."""
    with _lock:
        if not _stances:
            _stances.append(torch.compiler.set_stance("force_eager"))
            # The module around the compiled one runs our hooks too, which know it and pass it by.
            warnings.filterwarnings("ignore", HOOKS_RUN_TWICE)
        else:
            _stances.append(nullcontext())


def run_compiled() -> None:
    with _lock:
        if len(_stances) == 1:
            _stances[0].__exit__(None, None, None)
            own = [one for one in warnings.filters if getattr(one[1], "pattern", "") == HOOKS_RUN_TWICE]
            for one in own:
                cast("list[object]", warnings.filters).remove(one)
            _stances.clear()
        else:
            _stances.pop()


@contextmanager
def uncompiled(watch: Interceptor) -> Iterator[None]:
    if not watch.is_compiled:
        yield
        return
    run_uncompiled()
    try:
        yield
    finally:
        run_compiled()
