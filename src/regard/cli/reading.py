"""The line that says which downloaded model is read."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.cli.progress import telling
from regard.files.untrusted import check_tensors
from regard.tasks.runs.foreign_folders import family_of
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
        files = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")]
        size = sum(path.stat().st_size for path in files)
        line = f"reading {folder}: {family_of(folder)}, {size / 1e6:,.0f} MB"
        if size >= LARGE and not sys.stderr.isatty():
            for path in files:
                if path.suffix == ".safetensors":
                    check_tensors(path)
            print(line, file=sys.stderr, flush=True)
    with telling(first=line) as tell, warnings.catch_warnings(record=True) as told:
        yield tell
    for one in told:
        warnings.showwarning(one.message, one.category, one.filename, one.lineno)
