"""The code that several commands share."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import tyro

from regard.errors import ArgumentError
from regard.text.lines import StrPath, read_lines

Run = tyro.conf.Positional[Path]
"""A run folder, the first argument of most commands."""


def refuse_first(*wrongs: tuple[bool, str]) -> None:
    """Check some conditions, each with its error message.

    Raises:
        ArgumentError: a condition holds; the message is that of the first that does.
    """
    for is_wrong, message in wrongs:
        if is_wrong:
            raise ArgumentError(message)


def lines_of(paths: Sequence[StrPath]) -> Iterable[str]:
    """The lines of files, one file after the other."""
    return (line for path in paths for line in read_lines(path))


def print_table(rows: Iterable[tuple[str, ...]]) -> None:
    """Print rows with tabs between their cells."""
    for row in rows:
        print("\t".join(row))
