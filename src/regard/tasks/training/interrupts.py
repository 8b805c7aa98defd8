"""Ctrl-C and SIGTERM become a request to stop, read by the training loop between two steps."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """The signal of this number asked to stop; the shell expects the exit status 128 + signal."""

    def __init__(self, signal_number: int, message: str | None = None) -> None:
        super().__init__(message or f"stopped by {signal.Signals(signal_number).name}")
        self.signal = signal_number


class TrainingInterrupted(Interrupted):
    def __init__(self, step: int, signal_number: int) -> None:
        name = signal.Signals(signal_number).name
        super().__init__(signal_number, f"stopped by {name} after step {step:,}, which is saved")
        self.step = step


class StopWish:
    def __init__(self) -> None:
        self.signal = 0

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Remember the signal. A second Ctrl-C does not wait until the step ends."""
        if self.signal == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number


@contextmanager
def listening() -> Iterator[StopWish]:
    """Turn SIGINT and SIGTERM into a wish to stop while the block runs, in the main thread alone."""
    wish = StopWish()
    with handled(wish.note, signal.SIGINT, signal.SIGTERM):
        yield wish


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Turn SIGTERM into an `Interrupted` while the block runs, as Python turns SIGINT into a KeyboardInterrupt: the
    program can undo half-done work on its way out, and report the reason."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(number)

    with handled(end, signal.SIGTERM):
        yield


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    """Have a function called for some signals while the block runs; in other threads than the main one, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
