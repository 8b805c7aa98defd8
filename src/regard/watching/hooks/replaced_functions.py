"""Functions in the Python modules of a model's classes, each replaced by one that observes it while a watch is open.

torch shows its own functions alone. A recurrence is a function of the model's library, and its parts say little.
"""

import sys
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from inspect import signature
from typing import Any

from torch import nn

from regard.tensors.guards import is_compiling
from regard.watching.hooks.thread_state import ThreadState
from regard.watching.readers.recurrent_calls import RECURRENCES, ReadCall, held_state, observe_recurrence

Place = tuple[str, str]
"""The name of a Python module, and that of a function in it."""

_lock = threading.Lock()
_replaced: dict[Place, tuple[Callable[..., Any], int]] = {}
"""The function that was in each place, and how many open watches replaced it."""


def replace_functions(modules: Iterable[nn.Module], thread_of: Callable[[], ThreadState | None]) -> list[Place]:
    """Replace the known functions beside the classes of these modules; return their places."""
    homes = {kind.__module__ for module in modules for kind in type(module).__mro__}
    places = [(home, name) for home in homes for name in RECURRENCES if callable(getattr(_of(home), name, None))]
    with _lock:
        for home, name in places:
            original, users = _replaced.get((home, name), (None, 0))
            if original is None:
                original = getattr(_of(home), name)
                setattr(_of(home), name, _observing(original, RECURRENCES[name], thread_of))
            _replaced[home, name] = original, users + 1
    return places


def put_back(places: Iterable[Place]) -> None:
    """Put the functions back that no other open watch needs."""
    with _lock:
        for home, name in places:
            original, users = _replaced.pop((home, name))
            if users > 1:
                _replaced[home, name] = original, users - 1
            else:
                setattr(_of(home), name, original)


def _of(home: str) -> Any:
    return sys.modules.get(home)


def _observing(
    original: Callable[..., Any], read: ReadCall, thread_of: Callable[[], ThreadState | None]
) -> Callable[..., Any]:
    takes = signature(original)

    @wraps(original)
    def observing(*args: Any, **kwargs: Any) -> Any:
        thread = None if is_compiling() else thread_of()
        if thread is None or not thread.watches or thread.is_reading:
            return original(*args, **kwargs)
        given = takes.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        state, was_hidden = held_state(given), thread.hidden
        thread.hide(True)  # Its products are part of this one call.
        try:
            result = original(*args, **kwargs)
        finally:
            thread.hide(was_hidden)
        thread.try_to(observe_recurrence, thread, read, given, state, result)
        return result

    return observing
