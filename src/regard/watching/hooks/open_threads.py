"""The threads in which a watch is open."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from regard.errors import ArgumentError
from regard.watching.hooks.module_hooks import install_hooks, remove_hooks
from regard.watching.hooks.named_functions import Home, late_kernels, put_functions_back, replace_functions
from regard.watching.hooks.this_thread import this_thread
from regard.watching.running.interceptor import Interceptor
from regard.watching.running.thread_state import ThreadState


def _uncompiled() -> ModuleType:
    from regard.watching.hooks import uncompiled  # with the first compiled model

    return uncompiled


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
            _uncompiled().run_uncompiled()
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
            _uncompiled().run_compiled()
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
