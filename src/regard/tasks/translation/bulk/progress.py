"""Show the progress of a file as one live line in a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from regard.errors import MissingExtraError


@contextmanager
def counting(file: IO[str], *, total: int | None, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A function that takes the number of lines done, and shows it on `file` if that is a terminal.

    Args:
        file: usually standard error, as results go to standard output.
        total: how many lines there are; None if that is not known.
        done: how many lines were done before.

    Raises:
        MissingExtraError: `file` is a terminal and rich is not installed.
    """
    if not file.isatty():
        yield lambda lines: None
        return
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        raise MissingExtraError("rich", extra="train") from None
    columns = progress.TextColumn("lines"), progress.MofNCompleteColumn(), progress.BarColumn()
    speed_and_end = progress.TextColumn("{task.fields[speed]}"), progress.TimeRemainingColumn()
    with progress.Progress(*columns, *speed_and_end, console=Console(file=file)) as bar:
        task = bar.add_task("", total=total, completed=done, speed="")

        def tell(lines: int) -> None:
            speed = bar.tasks[0].speed
            bar.update(task, completed=lines, speed="" if speed is None else f"{speed:,.0f}/s")

        yield tell
