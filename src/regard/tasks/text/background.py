"""Long work of a library that Ctrl-C and SIGTERM can end: Python handles signals in its main thread alone."""

from collections.abc import Callable
from threading import Thread, current_thread, main_thread
from typing import TypeVar

T = TypeVar("T")
LOOKING_S = 0.1
"""Seconds until Windows, where waiting cannot be interrupted, looks for Ctrl-C again."""


def in_background(work: Callable[[], T]) -> T:
    """The result of some work, done in another thread, so that the handler of a signal runs at once.

    If the handler raises, the work is left to itself, and ends with the process.
    """
    if current_thread() is not main_thread():
        return work()
    results: list[T] = []
    errors: list[BaseException] = []

    def do() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=do, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOOKING_S)
    if errors:
        raise errors[0]
    return results[0]
