"""How far a long command is: one live line in a terminal, and elsewhere a line every ten seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import IO

from regard.tasks.telling import Tell

LIVE_SECONDS, PLAIN_SECONDS = 0.2, 10.0
"""The least time between two lines."""


@contextmanager
def telling(file: IO[str] | None = None, *, first: str = "") -> Iterator[Tell]:
    """A function to show the progress of the block, on standard error unless another file is given."""
    out, live = file or sys.stderr, (file or sys.stderr).isatty()
    width = get_terminal_size().columns - 1 if live else None
    shown = first[:width] if live else ""
    print(shown, end="", file=out, flush=True)
    last = 0.0 if live else None

    def tell(what: str, done: int, total: int | None) -> None:
        nonlocal shown, last
        now = time.monotonic()
        if last is None:  # the imports before are no part of the work
            last = now
        if now - last < (LIVE_SECONDS if live else PLAIN_SECONDS):
            return
        line, last = (f"{what}: {done:,}" + ("" if total is None else f" of {total:,}"))[:width], now
        print(f"\r{line:<{len(shown)}}" if live else line, end="" if live else "\n", file=out, flush=True)
        shown = line

    try:
        yield tell
    finally:
        if live and shown:
            print(f"\r{'':<{len(shown)}}\r", end="", file=out, flush=True)
