"""The line that says which downloaded model is read."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.cli.progress import telling
from regard.tasks.runs.foreign_folders import check_weights, family_of, size_of_weights
from regard.tasks.telling import Tell

LARGE = 50_000_000
"""Bytes of weights from which on a log has a line of its own for their reading."""


@contextmanager
def reading(folder: Path | None) -> Iterator[Tell]:
    """Show that a downloaded model is read, and how far, from before torch and transformers are imported.

    A terminal has one line, gone at the end. Elsewhere, large weights have a line of their own once their headers are
    found sound: of smaller ones, nothing but a refusal is said. Warnings of the block are said when it is done.
    """
    line = ""
    if folder is not None:
        size = size_of_weights(folder)
        line = f"reading {folder}: {family_of(folder)}, {size / 1e6:,.0f} MB"
        if size >= LARGE and not sys.stderr.isatty():
            check_weights(folder)
            print(line, file=sys.stderr, flush=True)
    with telling(first=line) as tell, warnings.catch_warnings(record=True) as told:
        yield tell
    for one in told:
        warnings.showwarning(one.message, one.category, one.filename, one.lineno)
