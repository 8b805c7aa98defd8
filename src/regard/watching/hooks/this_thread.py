"""The state of the running thread, made when the thread first opens a watch."""

import threading

from regard.watching.hooks.torch_mode import FunctionMode
from regard.watching.running.thread_state import ThreadState

_local = threading.local()


def this_thread() -> ThreadState:
    """The state of the current thread."""
    thread = known_thread()
    if thread is None:
        thread = _local.thread = ThreadState()
        thread.mode = FunctionMode(thread)
    return thread


def known_thread() -> ThreadState | None:
    """The same; None for a thread that never opened a watch."""
    return getattr(_local, "thread", None)
