"""Ctrl-C and SIGTERM during the imports of a command: the process ends at once, and says so in one line.

An import is seconds of other people's code. A KeyboardInterrupt in it can be swallowed (torch itself goes on without
numpy) or come out as another error, and there is nothing to undo yet.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType

from regard.tasks.training.interrupts import handled


def speaks() -> bool:
    """Whether this process speaks: of the ranks of torchrun, one does so for all."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def loading(*optional: str) -> Iterator[None]:
    """End the process at once if SIGINT or SIGTERM comes during the imports of the block."""
    with handled(_end, signal.SIGINT, signal.SIGTERM):
        yield
        for name in optional:
            with suppress(ImportError):
                import_module(name)


def _end(number: int, _frame: FrameType | None) -> None:
    if speaks():
        line = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"regard: {line}\n".encode())
    os._exit(128 + number)
