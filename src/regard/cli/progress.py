"""How far a long command is: one live line in a terminal, and elsewhere a line every ten seconds."""

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from typing import IO

from regard.files.model_folder import OnProgress, check_weights, family_of

LIVE_SECONDS, PLAIN_SECONDS = 0.2, 10.0
"""The least time between two lines."""


@contextmanager
def showing_progress(file: IO[str] | None = None, *, first: str = "") -> Iterator[OnProgress]:
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


LARGE = 50_000_000
"""Bytes of weights from which on a log has a line of its own for their reading."""


@contextmanager
def reading(folder: Path | None) -> Iterator[OnProgress]:
    """Show that a downloaded model is read, and how far, from before torch and transformers are imported.

    A terminal has one line, gone at the end. Elsewhere, large weights have a line of their own once their headers are
    found sound: of smaller ones, nothing but a refusal is said. Warnings of the block are said when it is done.
    """
    line = ""
    if folder is not None:
        size = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
        line = f"reading {folder}: {family_of(folder)}, {size / 1e6:,.0f} MB"
        if size >= LARGE and not sys.stderr.isatty():
            check_weights(folder)
            print(line, file=sys.stderr, flush=True)
    with showing_progress(first=line) as tell, warnings.catch_warnings(record=True) as told:
        yield tell
    for one in told:
        warnings.showwarning(one.message, one.category, one.filename, one.lineno)
