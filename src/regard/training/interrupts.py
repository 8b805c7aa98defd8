"""Ctrl-C and SIGTERM as a wish that the training loop can read between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TrainingInterrupted(KeyboardInterrupt):
    """Training was stopped by a signal after its state was saved.

    Attributes:
        step: the last step that was made and saved.
        signal: the number of the signal; the shell expects the exit status 128 + signal.
    """

    def __init__(self, step: int, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} after step {step:,}, which is saved")
        self.step = step
        self.signal = signal_number


class StopWish:
    """The signal that asked to stop, or 0."""

    def __init__(self) -> None:
        self.signal = 0

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Remember the signal; a second Ctrl-C does not wait for the step to end."""
        if self.signal == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number


@contextmanager
def listening() -> Iterator[StopWish]:
    """Turn SIGINT and SIGTERM into a wish while the block runs; other threads cannot set handlers and get none.

    >>> with listening() as wish:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     wish.signal == signal.SIGTERM
    True
    """
    wish = StopWish()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    before = {number: signal.signal(number, wish.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
